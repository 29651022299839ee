"""A page store on Mooncake Store: kvferry's pages as objects of a running Mooncake cluster."""

from kvstore.mooncake.binding import MooncakeUnavailable
from kvstore.mooncake.config import MooncakeConfig
from kvstore.mooncake.store import MooncakeStore

__all__ = ["MooncakeConfig", "MooncakeStore", "MooncakeUnavailable"]
