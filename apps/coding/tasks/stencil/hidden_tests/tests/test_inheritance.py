import pytest

from stencil import TemplateError, Templates

BASE = "<{% block title %}Shop{% end %}>{% block main %}nothing{% end %}."


def render(text, *, variables={}, **others):
    return Templates({"base": BASE, **others, "t": text}).render("t", **variables)


def test_blocks_on_their_own():
    assert render(BASE) == "<Shop>nothing."
    assert render("{% extends base %}") == "<Shop>nothing."
    assert render(" \n{% extends   base %}\n{# c #}{% block main %}x{% end %}\n") == "<Shop>x."


def test_super():
    assert render("{% extends base %}{% block title %}{% super %}+{% super %}{% end %}") == "<Shop+Shop>nothing."


def test_several_levels():
    middle = "{% extends base %}{% block title %}M({% super %}){% end %}{% block main %}m{% end %}"
    top = "{% extends middle %}{% block title %}T({% super %}){% end %}"
    assert render(top, middle=middle) == "<T(M(Shop))>m."
    skipping = "{% extends other %}{% block title %}S({% super %}){% end %}"
    assert render(skipping, middle=middle, other="{% extends middle %}") == "<S(M(Shop))>m."
    five = {f"l{n}": f"{{% extends l{n - 1} %}}{{% block title %}}{n}{{% super %}}{{% end %}}" for n in range(1, 5)}
    assert render("{% extends l4 %}", l0=BASE, **five) == "<4321Shop>nothing."


def test_blocks_in_loops_and_conditions():
    base = "{% for x in all %}{% block item %}{{ x }}{% end %};{% end %}{% if all %}{% block yes %}y{% end %}{% else %}{% block no %}n{% end %}{% end %}"
    text = "{% extends b %}{% block item %}({% super %}{{ x }}){% end %}{% block no %}NO{% end %}"
    assert render(text, b=base, variables={"all": "ab"}) == "(aa);(bb);y"
    assert render(text, b=base, variables={"all": ""}) == "NO"


def test_blocks_inside_of_blocks():
    base = "{% block a %}[{% block b %}b{% end %}]{% end %}"
    assert render("{% extends x %}{% block b %}B{% end %}", x=base) == "[B]"
    assert render("{% extends x %}{% block b %}B{% end %}{% block a %}A{% super %}{% end %}", x=base) == "A[B]"
    assert render("{% extends x %}{% block a %}A{% end %}{% block b %}B{% end %}", x=base) == "A"
    middle = "{% extends x %}{% block a %}({% block c %}c{% end %}{% super %}){% end %}"
    assert (
        render("{% extends m %}{% block c %}{% super %}C{% end %}{% block b %}<{% super %}>{% end %}", x=base, m=middle)
        == "(cC[<b>])"
    )


def test_blocks_that_nobody_renders_are_ignored():
    assert render("{% extends base %}{% block extra %}{{ missing }}{% end %}") == "<Shop>nothing."


def test_escaping_happens_once():
    text = "{% extends b %}{% block x %}{{ v }}{% super %}{% end %}"
    assert render(text, b="{% block x %}{{ v }}&{% end %}", variables={"v": "<"}) == "&lt;&lt;&"


def test_includes_have_blocks_of_their_own():
    part = "{% extends base %}{% block title %}part {{ v }}{% end %}"
    text = "{% extends base %}{% block title %}page{% end %}{% block main %}{% include part %}{% super %}{% end %}"
    assert render(text, part=part, variables={"v": 1}) == "<page><part 1>nothing.nothing."
    assert render("{% block title %}{% include base %}{% end %}") == "<Shop>nothing."


def test_templates_can_be_rendered_again():
    templates = Templates(
        {
            "base": BASE,
            "a": "{% extends base %}{% block main %}a{% super %}{% end %}",
            "b": "{% extends base %}{% block title %}b{% end %}",
        }
    )
    for _ in range(2):
        assert [templates.render(name) for name in ("a", "b", "base")] == [
            "<Shop>anothing.",
            "<b>nothing.",
            "<Shop>nothing.",
        ]


MISTAKES = {
    "unknown_base": ("\n{% extends none %}", {}, "t, line 2"),
    "circle": ("{% extends u %}", {"u": "\n\n{% extends t %}"}, "(t, line 1|u, line 3)"),
    "itself": ("{% extends t %}", {}, "t, line 1"),
    "twice": ("{% block a %}{% end %}\n{% block a %}{% end %}", {}, "t, line 2"),
    "twice_inside": ("{% block a %}\n{% block a %}{% end %}{% end %}", {}, "t, line 2"),
    "late": ("{% block a %}{% end %}\n{% extends base %}", {}, "t, line 2"),
    "after_text": ("x{% extends base %}", {}, "t, line 1"),
    "after_value": ("{{ v }}{% extends base %}", {}, "t, line 1"),
    "two_bases": ("{% extends base %}\n{% extends base %}", {}, "t, line 2"),
    "text_outside": ("{% extends base %}{% block title %}{% end %}x", {}, "t, line 1"),
    "value_outside": ("{% extends base %}\n{{ v }}", {}, "t, line 2"),
    "tag_outside": ("{% extends base %}\n{% if v %}{% end %}", {}, "t, line 2"),
    "super_outside": ("\n{% super %}", {}, "t, line 2"),
    "super_outside_in_if": ("\n{% if v %}{% super %}{% end %}", {}, "t, line 2"),
    "super_of_nothing": ("{% block a %}\n{% super %}{% end %}", {}, "t, line 2"),
    "super_of_nothing_below": (
        "{% extends u %}{% block b %}\n{% super %}{% end %}",
        {
            "u": "{% extends base %}{% block title %}{% block b2 %}{% end %}{% end %}{% block main %}{% include w %}{% end %}",
            "w": "{% block b %}\n\n{% super %}{% end %}",
        },
        "w, line 3",
    ),
    "mistake_in_the_base": ("{% extends u %}", {"u": "{% extends base %}\n{% block x %}"}, "u, line 2"),
    "else_in_a_block": ("{% block a %}\n{% else %}{% end %}", {}, "t, line 2"),
    "without_a_name": ("\n{% block %}{% end %}", {}, "t, line 2"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    text, others, place = MISTAKES[name]
    with pytest.raises(TemplateError, match=f"^{place}: "):
        render(text, variables={"v": 1}, **others)
