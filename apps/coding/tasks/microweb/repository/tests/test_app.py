import json

import pytest

from microweb import App, Response


@pytest.fixture
def app():
    app = App()
    app.route("/")(lambda request: "home")
    app.route("/hello/<name>")(lambda request, name: f"{name} {request.query.get('q')}")
    app.route("/notes/<int:id>", methods=["put"])(
        lambda request, id: Response(request.body, 201, {"X-Id": str(id + 1)})
    )
    app.route("/json")(lambda request: {"a": 1})
    app.route("/wrong")(lambda request: 3)
    return app


def test_texts_and_variables(app):
    assert app.ask("GET", "/").body == b"home"
    assert app.ask("GET", "/hello/you?q=x+y").body == b"you x y"
    assert app.ask("GET", "/").headers == {"Content-Length": "4", "Content-Type": "text/plain; charset=utf-8"}


def test_responses_and_json(app):
    response = app.ask("PUT", "/notes/7", b"text")
    assert (response.status, response.body, response.headers["X-Id"]) == (201, b"text", "8")
    assert json.loads(app.ask("GET", "/json").body) == {"a": 1}
    with pytest.raises(TypeError):
        app.ask("GET", "/wrong")


def test_paths_that_do_not_fit(app):
    for path in ("/none", "/hello", "/hello/", "/hello/a/b", "/notes/x"):
        assert app.ask("GET", path).status == 404


def test_methods_that_do_not_fit(app):
    response = app.ask("DELETE", "/notes/7")
    assert (response.status, response.headers["Allow"]) == (405, "PUT")
