"""The HTTP door of kvferry: OpenAI API, tokenisation, routing, failover. Never imports torch."""

from gateway.app import create_app
from gateway.config import DispatcherConfig, GatewayConfig, RouterConfig
from gateway.dispatch import Dispatcher
from gateway.errors import GatewayError
from gateway.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer, load_tokenizer
from gateway.trace import GenerationDone, GenerationTrace

__all__ = [
    "ByteTokenizer",
    "Dispatcher",
    "DispatcherConfig",
    "GatewayConfig",
    "GatewayError",
    "GenerationDone",
    "GenerationTrace",
    "HfTokenizer",
    "RouterConfig",
    "Tokenizer",
    "create_app",
    "load_tokenizer",
]
