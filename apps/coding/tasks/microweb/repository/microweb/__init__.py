"""A tiny WSGI framework."""

from microweb.app import App
from microweb.messages import Request, Response

__all__ = ["App", "Request", "Response"]
