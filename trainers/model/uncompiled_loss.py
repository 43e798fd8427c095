"""The chunked loss as the compiler is to see it: a call that its graphs leave out.

It has a file of its own since the decorator imports the compiler: a second that a start without one need not wait for.
"""

import torch

from batchscout.trainers.model.chunked_loss import loss_in_chunks

# In a graph of the whole model the loop would be unrolled, and its chunks planned as one.
loss_outside_graphs = torch.compiler.disable(loss_in_chunks)
