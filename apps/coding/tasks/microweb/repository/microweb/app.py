"""The application."""

import io
from http import HTTPStatus

from microweb.messages import Request, Response
from microweb.router import Router


class App:
    """A WSGI application of routes."""

    def __init__(self):
        self.router = Router()

    def route(self, pattern, methods=("GET",)):
        """Add the decorated function as the handler of a pattern."""

        def add(handler):
            self.router.add(pattern, methods, handler)
            return handler

        return add

    def respond(self, request):
        """The response to a request."""
        route, values = self.router.find(request.path)
        if route is None:
            return Response(b"not found", 404)
        if request.method not in route.methods:
            return Response(b"method not allowed", 405, {"Allow": ", ".join(sorted(route.methods))})
        return Response.of(route.handler(request, **values))

    def __call__(self, environ, start_response):
        response = self.respond(Request.from_environ(environ))
        headers = {"Content-Length": str(len(response.body)), **response.headers}
        start_response(f"{response.status} {HTTPStatus(response.status).phrase}", list(headers.items()))
        return [response.body]

    def ask(self, method, path, body=b""):
        """The response that a client gets, by way of WSGI."""
        path, _, query = path.partition("?")
        environ = {"REQUEST_METHOD": method, "RAW_PATH": path, "QUERY_STRING": query}
        environ |= {"CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
        started = []
        chunks = self(environ, lambda status, headers: started.extend((status, headers)))
        return Response(b"".join(chunks), int(started[0].split()[0]), dict(started[1]))
