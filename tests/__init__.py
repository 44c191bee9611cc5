import os

import torch

if (
    not torch.cuda.is_available()
):  # kernels run in Triton's interpreter; it is read where triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
