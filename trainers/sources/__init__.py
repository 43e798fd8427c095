"""Objects that train elsewhere, taken as they are: a LightningModule with its data, and a Trainer of transformers or TRL.

None of these libraries is imported here: their classes go by their names, and whoever hands one over has imported it.
"""
