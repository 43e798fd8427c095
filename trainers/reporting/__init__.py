"""What a run says while it trains.

When it reports and saves belongs here, how it is evaluated, and how its gradient noise is measured at weights that
stand still. What the driver reads of a run does not: that loads no torch.
"""
