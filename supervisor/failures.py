"""Failures inside, counted and told in one place with those of the proxy."""

from proxy.failures import FAILURES, FailureHandler, persist
from proxy.throttle import Throttle

__all__ = ["FAILURES", "FailureHandler", "Throttle", "persist"]
