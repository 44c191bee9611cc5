"""Which network computes a drafter, by its contract."""

from eyas.contract import Contract
from eyas.drafter.latent import LatentDrafter
from eyas.drafter.network import Drafter

NETWORKS: dict[str, type[Drafter]] = {"eagle3-llama": Drafter, "eagle3-mla": LatentDrafter}


def build(contract: Contract) -> Drafter:
    """An untrained drafter of a contract."""
    return NETWORKS[contract.architecture](contract)
