"""eyas raises an EAGLE-3 drafter for a served language model and proves that it makes serving faster."""

__version__ = "0.1.0"
