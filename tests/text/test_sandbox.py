from __future__ import annotations

import time

import jinja2
import pytest
from jinja2.exceptions import SecurityError, TemplateError

from jaxserve.text.sandbox import LimitExceeded, Meter, TemplateEnvironment, run

ENVIRONMENT = TemplateEnvironment()


def render(
    source: str, *, steps: int = 100_000, characters: int = 1_000_000, seconds: float = 5.0, **variables: object
) -> str:
    return run(ENVIRONMENT.from_string(source), variables, Meter(steps, characters, seconds))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if true %}\n  {{ 1 }}\n{% endif %}\n", "  1\n"),
        ("  {% set x = 2 %}\n{{ x }}", "2"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(4) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("{% for i in [5, 6] %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }} {% endfor %}", "0False2 1True2 "),
        ("{% for i in (x for x in y) %}{% endfor %}", None),
        ("{% for i in y | selectattr('a') %}{{ loop.first }}{{ loop.revindex }}{{ i.a }}{% endfor %}", "True22False13"),
        ("{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "b=1;a=2;"),
        ("{% for k, v in d | dictsort %}{{ k }}={{ v }};{% endfor %}", "a=2;b=1;"),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for i in [1, [2]] recursive %}{{ '<' ~ loop(i) ~ '>' if i is iterable else i }}{% endfor %}", "1<2>"),
        ("{% generation %}a{% set x = 1 %}{% endgeneration %}b", "ab"),
        ("{{ {'b': '<é&\"', 'a': [1, none]} | tojson }}", '{"b": "<é&\\"", "a": [1, null]}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ ('[1, 2]' | from_json)[1] }}", "2"),
        ("{% set n = namespace(i=1) %}{% for x in 'ab' %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}", "3"),
        ("{% set n = namespace({'self': 4}) %}{{ n.self }}", "4"),
        ("{% set n = namespace(self=4) %}{{ n.self }}", "4"),
        ("{{ dict(a=1)['a'] }}{{ dict.fromkeys('x', 2) }}", "1{'x': 2}"),
        ("{{ 1 ~ 'a' ~ none ~ 2.5 }}", "1aNone2.5"),
        ("{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 'ab' * 2 }}{{ '%s-%d' % ('x', 3) }}{{ 2 ** 10 }}", "ab[1, 2]ababx-31024"),
        ("{{ 'a{}b'.format(1) }}{{ '%s!' | format('x') }}", "a1bx!"),
        ("{{ ' a ' | trim }}{{ 'a' | upper }}{{ 'abc' | replace('b', 'xx') }}{{ [1, 2] | join('-') }}", "aAaxxc1-2"),
        ("{{ 'a\nb' | indent(2) }}{{ 'a' | center(5) }}{{ 2.567 | round(1) }}", "a\n  b  a  2.6"),
        ("{{ [1, 2, 3] | batch(2) | list }}{{ 'x,y'.split(',') }}", "[[1, 2], [3]]['x', 'y']"),
        ("{{ 'abc'.replace('b', '') }}{{ '-'.join(['a', 'b']) }}{{ 'a'.ljust(3) }}", "aca-ba  "),
        ("{% macro m(a) %}<{{ a }}{{ caller() }}>{% endmacro %}{% call m(1) %}in{% endcall %}", "<1in>"),
        ("{% set x %}block{% endset %}{{ x | length }}", "5"),
        ("{{ undefined_name }}{{ none is none }}{{ 'a' in 'abc' }}{{ y[-1].a }}", "TrueTrue3"),
        ("{{ '<' }}", "<"),
    ],
)
def test_semantics(source, text):
    variables = {"y": [{"a": 2}, {"a": 3}], "d": {"b": 1, "a": 2}}
    if text is None:
        with pytest.raises(TemplateError):
            render(source, **variables)
    else:
        assert render(source, **variables) == text


PAYLOADS = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '' | attr('__cl' ~ 'ass__') | attr('__mro__') }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ dict.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "{% set n = namespace(__class__=1) %}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{% set _ = messages[0].update({'role': 'system'}) %}",
    "{{ strftime_now.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.getcwd() }}",
    "{{ ''.__init_subclass__ }}{{ ''.mro() }}",
]


@pytest.mark.parametrize("source", PAYLOADS)
def test_injections_are_refused(source):
    def strftime_now(form: str) -> str:
        return form

    messages = [{"role": "user", "content": "x"}]
    with pytest.raises((SecurityError, jinja2.UndefinedError, TypeError)):  # TypeError: there is no loader
        render(source, messages=messages, strftime_now=strftime_now)
    assert messages == [{"role": "user", "content": "x"}]


BOMBS = [
    "{{ 'a' * 10 ** 8 }}",
    "{{ [0] * 10 ** 9 }}",
    "{{ 10 ** 8 * 'a' }}",
    "{% for i in range(2000) %}{% for j in range(2000) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ lipsum(n=20000) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s.replace('a', n.s) %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s | replace('a', n.s) %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s.join([n.s, n.s]) %}{% endfor %}",
    "{% set n = namespace(i=9) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.zfill(1000000000) }}",
    "{{ 'a\n' | indent(1000000000) }}",
    "{{ '\t'.expandtabs(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'a'.translate({97: 'b' * 1000}) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ [1] | batch(1000000000, 0) | list }}",
    "{{ [1] | slice(1000000000) | list }}",
    "{% for i in range(500) %}{{ range(99999) | map('string') | join }}{% endfor %}",
    "{% for i in range(5000) %}{{ range(9999) | sum }}{% endfor %}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_bombs_are_stopped(source):
    start = time.monotonic()
    with pytest.raises((LimitExceeded, jinja2.UndefinedError, RecursionError)):
        render(source)
    assert time.monotonic() - start < 5


def test_time_is_a_limit_too():
    with pytest.raises(LimitExceeded, match="too many steps"):
        render(
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", steps=10**12, seconds=0.2
        )


def test_work_within_the_limits_is_done():
    assert len(render("{% for i in range(9000) %}{{ i % 10 }}{% endfor %}")) == 9000


def test_meters_do_not_mix():
    outer = ENVIRONMENT.from_string("{{ f() }}{{ 'x' * 900 }}")

    def f() -> str:
        return render("{{ 'y' * 900 }}", characters=2000)

    with pytest.raises(LimitExceeded):
        run(outer, {"f": f}, Meter(100, 2000, 5.0))
    assert len(run(outer, {"f": f}, Meter(100, 10_000, 5.0))) == 1800


def test_exceptions_of_a_template():
    with pytest.raises(TemplateError, match=r"^no system role$"):
        render("{{ raise_exception('no system role') }}")
