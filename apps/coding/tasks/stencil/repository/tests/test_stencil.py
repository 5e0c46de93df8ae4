import pytest

from stencil import TemplateError, Templates


def render(text, **variables):
    return Templates({"t": text, "part": "[{{ x }}]"}).render("t", **variables)


def test_values():
    assert render("{{ a.b }} {{ a.b | raw }}{# no #}", a={"b": "<&>"}) == "&lt;&amp;&gt; <&>"
    assert render("{{ a | length }}{{ b|upper|raw }}", a=[1, 2], b="<x>") == "2<X>"


def test_tags():
    assert render("{% if a %}1{% else %}2{% end %}{% if not a %}3{% end %}", a=0) == "23"
    assert render("{% for x in all %}{{ x }},{% else %}none{% end %}", all="ab") == "a,b,"
    assert render("{% for x in all %}{{ x }}{% else %}none{% end %}", all=[]) == "none"
    assert render("{% for x in all %}{%include part%}{% end %}", all="ab") == "[a][b]"


@pytest.mark.parametrize(
    "text",
    [
        "\n{{ b }}",
        "\n{% if a %}",
        "\n{% end %}",
        "\n{% foo %}",
        "\n{{ a | foo }}",
        "\n{% include none %}",
        "\n{% for x in b %}{% end %}",
    ],
    ids=["value", "open", "end", "tag", "filter", "include", "for"],
)
def test_mistakes(text):
    with pytest.raises(TemplateError, match="^t, line 2: "):
        render(text, a=1)
