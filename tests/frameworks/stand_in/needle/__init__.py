"""A stand-in for the parts of Needle that the tutorial's training uses, on NumPy, for tests without a checkout.

Values lie in memory of the device, behind a handle, as with Needle's backend in C++: `numpy()` copies them out, and a
new tensor copies them in.
"""

from . import data, nn, optim
from .autograd import Tensor
from .backend import NDArray, cpu, cuda

__all__ = ["NDArray", "Tensor", "cpu", "cuda", "data", "nn", "optim"]
