import pytest

from microweb import App, Response


@pytest.fixture
def app():
    app = App()
    app.route("/items/<int:id>")(lambda request, id: f"item {id}")
    app.route("/items/new")(lambda request: "form")
    app.route("/items/<name>", methods=["GET", "POST"])(lambda request, name: f"any {name}")
    app.route("/items/<int:id>", methods=["DELETE"])(lambda request, id: Response(status=204))
    app.route("/probe", methods=["HEAD"])(lambda request: Response(b"", headers={"X-Probe": "own"}))
    app.route("/probe")(lambda request: Response(b"got", headers={"X-Probe": "get"}))
    app.route("/late")(lambda request: Response(b"got", 201, {"X-Late": "get"}))
    app.route("/late", methods=["HEAD", "OPTIONS"])(lambda request: Response(request.method.encode()))
    app.route("/pairs/<a>/<b>")(lambda request, a, b: {"a": a, "b": b})
    return app


def test_the_first_route_of_path_and_method(app):
    assert app.ask("DELETE", "/items/3").status == 204
    assert app.ask("POST", "/items/3").body == b"any 3"
    assert app.ask("GET", "/items/3").body == b"item 3"
    assert app.ask("GET", "/items/new").body == b"form"
    assert app.ask("POST", "/items/new").body == b"any new"


def test_allow_lists_the_methods_of_all_routes(app):
    assert app.ask("PUT", "/items/3").headers["Allow"] == "DELETE, GET, HEAD, POST"
    assert app.ask("DELETE", "/items/new").headers["Allow"] == "GET, HEAD, POST"
    response = app.ask("DELETE", "/probe")
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


def test_paths_without_routes_are_still_404(app):
    for method in ("GET", "HEAD", "OPTIONS", "DELETE"):
        assert app.ask(method, "/items/3/x").status == 404


def test_head_is_get_without_a_body(app):
    for path in ("/items/12", "/items/some", "/late", "/pairs/x/y"):
        head, get = app.ask("HEAD", path), app.ask("GET", path)
        assert (head.status, head.headers) == (get.status, {**get.headers, "Content-Length": str(len(get.body))})
        assert head.body == b""
    assert app.ask("HEAD", "/items/some").headers["Content-Length"] != "0"


def test_a_route_for_head_that_comes_first(app):
    assert app.ask("HEAD", "/probe").headers["X-Probe"] == "own"
    assert app.ask("GET", "/probe").headers["X-Probe"] == "get"
    assert app.ask("HEAD", "/late").headers["X-Late"] == "get"


def test_head_of_a_path_without_get(app):
    app.route("/upload", methods=["PUT"])(lambda request: "x")
    assert app.ask("HEAD", "/upload").status == 405
    assert app.ask("HEAD", "/upload").headers["Allow"] == "PUT"


def test_options(app):
    response = app.ask("OPTIONS", "/items/3")
    assert (response.status, response.body, response.headers["Allow"]) == (204, b"", "DELETE, GET, HEAD, POST")
    assert app.ask("OPTIONS", "/late").body == b"OPTIONS"


def test_values_are_decoded(app):
    assert app.ask("GET", "/pairs/a%20b/%E2%82%AC").body == b'{"a": "a b", "b": "\\u20ac"}'
    assert app.ask("GET", "/pairs/a%2Fb/c%252F").body == b'{"a": "a/b", "b": "c%2F"}'
    assert app.ask("GET", "/pairs/a+b/c").body == b'{"a": "a+b", "b": "c"}'


def test_literal_segments_and_numbers_are_decoded(app):
    assert app.ask("GET", "/item%73/%6E%65w").body == b"form"
    assert app.ask("GET", "/items/%33").body == b"item 3"
    assert app.ask("GET", "/pairs%2Fa%2Fb").status == 404
