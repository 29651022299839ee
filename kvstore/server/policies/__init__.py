"""Which page goes first, within the rules: one small class per policy."""

from kvstore.server.policies.base import EvictionPolicy
from kvstore.server.policies.named import POLICIES, policy_named

__all__ = ["POLICIES", "EvictionPolicy", "policy_named"]
