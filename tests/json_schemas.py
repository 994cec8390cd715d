"""Random JSON Schemas with the keywords of JSONSchemaBench, and schemas that are made to do harm."""

import json

FORMATS = ["date-time", "date", "time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri", "duration"]
PATTERNS = [
    "^[a-z]{1,8}$",
    "^[A-Z][0-9]+$",
    "^\\d{3}-\\d{4}$",
    "a|b",
    "^(\\w+\\.)*\\w+$",
    "^[^\\s/]+$",
    "x{2,4}",
    "^\u00e9+$",
]
NAMES = [
    "id",
    "name",
    "kind",
    "a b",
    "value",
    "tags",
    "\u00fcber",
    "x-y",
    "$ref_name",
    "items",
    'quote"d',
    "n\nl",
    "type",
]
# Keywords that llguidance does not have, each with a value.
UNSUPPORTED = [
    ("uniqueItems", True),
    ("not", {"type": "null"}),
    ("if", {"type": "string"}),
    ("contains", {"type": "integer"}),
    ("dependentRequired", {"id": ["name"]}),
    ("dependentSchemas", {"id": {"required": ["name"]}}),
    ("propertyNames", {"pattern": "^a"}),
    ("unevaluatedProperties", False),
    ("unevaluatedItems", False),
    ("minContains", 2),
]


def random_schema(random, depth=3):
    """Return a JSON Schema that may be recursive, unsatisfiable or not supported."""
    schema = _schema(random, depth)
    if not isinstance(schema, dict):
        return schema
    if random.random() < 0.3:
        node = {"type": "object", "properties": {"value": _leaf(random)}, "required": ["value"]}
        node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
        schema = {"$defs": {"node": node, "leaf": _leaf(random)}, **schema}
        inner = random.choice(list(_inner(schema)))
        inner[random.choice(list(inner))] = {"$ref": f"#/$defs/{random.choice(['node', 'leaf'])}"}
    if random.random() < 0.3:
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A", "description": "b", **schema}
    if random.random() < 0.1:
        keyword, value = random.choice(UNSUPPORTED)
        schema[keyword] = value
    return schema


def _inner(schema):
    """Yield the `properties` of a schema, which are added if it has none."""
    found = False
    for name, value in schema.items():
        if name == "properties" and value:
            found = True
            yield value
    if not found:
        schema["properties"] = {"value": {}}
        yield schema["properties"]


def _leaf(random):
    kind = random.randrange(10)
    if kind == 0:
        return {"type": "boolean"}
    if kind == 1:
        return {"type": "null"}
    if kind == 2:
        return {"const": random.choice(["x", 1, 1.5, None, True, [1, "a"], {"a": {}}, "\u20ac\n", ""])}
    if kind == 3:
        return {
            "enum": random.sample(
                ["red", "green", 1, -2, 0.5, None, False, [], {"a": 1}, 'q"', "\\"], random.randint(1, 6)
            )
        }
    if kind in (4, 5):
        low = random.choice([None, -1000, -1, 0, 0.5, 1, 99])
        schema = {"type": random.choice(["integer", "number"])}
        if low is not None:
            schema[random.choice(["minimum", "exclusiveMinimum"])] = low
        if random.random() < 0.5:
            schema[random.choice(["maximum", "exclusiveMaximum"])] = (low or 0) + random.choice(
                [0, 0.25, 1, 2, 10, 1e6]
            )
        if random.random() < 0.2:
            schema["multipleOf"] = random.choice([1, 2, 5, 0.5, 0.01, 10])
        return schema
    schema = {"type": "string"}
    if kind == 6:
        schema["pattern"] = random.choice(PATTERNS)
    elif kind == 7:
        schema["format"] = random.choice(FORMATS)
    elif kind == 8:
        schema["minLength"] = random.choice([0, 1, 5])
    if kind != 7 and random.random() < 0.5:
        schema["maxLength"] = random.choice([0, 3, 10, 100])
    return schema


def _schema(random, depth):
    kind = random.randrange(12) if depth else 11
    if kind == 11:
        return _leaf(random) if random.random() < 0.95 else random.choice([True, {}, {"type": ["string", "null"]}])
    if kind < 5:
        names = random.sample(NAMES, random.randint(0, 5))
        schema = {"type": "object", "properties": {name: _schema(random, depth - 1) for name in names}}
        schema["required"] = [name for name in names if random.random() < 0.6]
        if random.random() < 0.1:
            schema["required"].append("other")
        more = random.random()
        if more < 0.5:
            schema["additionalProperties"] = False
        elif more < 0.7:
            schema["additionalProperties"] = _leaf(random)
        if random.random() < 0.1:
            schema["patternProperties"] = {random.choice(["^x-", "_at$", "^[0-9]+$"]): _leaf(random)}
        if random.random() < 0.1:
            schema[random.choice(["minProperties", "maxProperties"])] = random.choice([0, 1, 2])
        return schema
    if kind < 8:
        schema = {"type": "array"}
        if random.random() < 0.9:
            schema["items"] = _schema(random, depth - 1)
        if random.random() < 0.2:
            schema["prefixItems"] = [_leaf(random) for _ in range(random.randint(1, 3))]
        least = random.choice([None, 0, 1, 3])
        if least is not None:
            schema["minItems"] = least
        if random.random() < 0.7:
            schema["maxItems"] = (least or 0) + random.choice([0, 1, 4])
        return schema
    some = [_schema(random, depth - 1) for _ in range(random.randint(1, 3))]
    if kind == 8:
        return {"anyOf": some}
    if kind == 9:
        tags = [{"properties": {"kind": {"const": f"k{place}"}}, "required": ["kind"]} for place in range(len(some))]
        return {random.choice(["oneOf", "anyOf"]): tags if random.random() < 0.5 else some, "type": "object"}
    return {"allOf": [some[0], random.choice([some[-1], {"description": "x"}, {"type": "object"}])]}


def _nested(count, begin, end):
    return begin * count + '{"type":"null"}' + end * count


def _chain(count, link):
    """Return a chain of definitions: each one is `link` around the next definition."""
    definitions = {f"d{place}": link({"$ref": f"#/$defs/d{place + 1}"}) for place in range(count)}
    return {"$defs": {**definitions, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _chars(text, count):
    return text * (count // len(text))


BIG = 130_000  # close to the longest schema that is accepted
# Each is the arguments of `Structured`: it must be refused or generate, within bounds.
HOSTILE = {
    # Deep.
    "arrays 60 deep": {"json_schema": _nested(60, '{"type":"array","items":', "}")},
    "arrays 4,000 deep": {"json_schema": _nested(4_000, '{"type":"array","items":', "}")},
    "not 10,000 deep": {"json_schema": _nested(10_000, '{"not":', "}")},
    "lists 100,000 deep": {"json_schema": '{"const":' + "[" * 60_000 + "]" * 60_000 + "}"},
    "anyOf 5,000 deep": {"json_schema": _nested(5_000, '{"anyOf":[', "]}")},
    "regex 60,000 groups deep": {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    "regex 200 groups deep": {"regex": "(" * 200 + "a" + ")" * 200},
    "lark 60,000 groups deep": {"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000},
    "gbnf 60,000 groups deep": {"grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000},
    # Chains and loops of references.
    "a loop of $ref": {"json_schema": {"$ref": "#"}},
    "two $ref in a loop": {
        "json_schema": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "an array of itself": {"json_schema": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
    "an object that needs itself": {
        "json_schema": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}
    },
    "allOf itself": {"json_schema": {"allOf": [{"$ref": "#"}, {"type": "integer"}]}},
    "anyOf itself twice": {"json_schema": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}, {"type": "null"}]}},
    "3,000 $ref": {"json_schema": _chain(3_000, lambda inner: inner)},
    "2,000 arrays by $ref": {"json_schema": _chain(2_000, lambda inner: {"type": "array", "items": inner})},
    "2,000 anyOf by $ref": {"json_schema": _chain(2_000, lambda inner: {"anyOf": [inner, {"type": "null"}]})},
    "doubling allOf": {"json_schema": _chain(30, lambda inner: {"allOf": [inner, inner]})},
    "doubling anyOf": {"json_schema": _chain(30, lambda inner: {"anyOf": [inner, inner]})},
    "doubling objects": {
        "json_schema": _chain(30, lambda inner: {"properties": {"a": inner, "b": inner}, "required": ["a", "b"]})
    },
    "a remote $ref": {"json_schema": {"$ref": "http://127.0.0.1:9/x"}},
    "a file as $ref": {"json_schema": {"$ref": "file:///etc/passwd"}},
    "12,000 rules in a chain": {
        "grammar": "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(8_000)) + 'a8000: "x"'
    },
    "8,000 terminals in a chain": {
        "grammar": "start: A0\n" + "".join(f'A{n}: A{n + 1} "y"\n' for n in range(6_000)) + 'A6000: "x"'
    },
    "gbnf with 500 terminals in a chain": {
        "grammar": "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(500)) + 'a500 ::= "x"'
    },
    "gbnf with 8,000 rules": {
        "grammar": "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1}\n" for n in range(8_000)) + 'a8000 ::= "x"'
    },
    "a rule of itself": {"grammar": "start: start"},
    "an ambiguous rule": {"grammar": 'start: s\ns: s s | s s s | "a" |'},
    "3,000 optional parts": {"grammar": "start: " + "a? " * 3_000 + '\na: "a"?'},
    # Large.
    "an enum of 10,000 texts": {"json_schema": {"enum": [f"x{n}abc" for n in range(10_000)]}},
    "an enum of one long text": {"json_schema": {"enum": [_chars("x", BIG)]}},
    "1,024 choices": {"choice": [f"{n:0100}" for n in range(1024)]},
    "5,000 properties": {
        "json_schema": {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(5_000)}}
    },
    "4,000 required properties": {
        "json_schema": {
            "type": "object",
            "properties": {f"p{n}": {} for n in range(4_000)},
            "required": [f"p{n}" for n in range(4_000)],
        }
    },
    "2,000 objects in anyOf": {
        "json_schema": {"anyOf": [{"properties": {f"p{n}": {}}, "required": [f"p{n}"]} for n in range(2_000)]}
    },
    "allOf of 14 anyOf": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"type": "string", "minLength": n}, {"type": "integer", "minimum": n}]} for n in range(14)
            ]
        }
    },
    "oneOf of 500 objects": {
        "json_schema": {"oneOf": [{"properties": {f"p{n}": {}}, "required": [f"p{n}"]} for n in range(500)]}
    },
    "a schema of 1 MB": {"json_schema": json.dumps({"description": "x" * 1_000_000})},
    "a schema at the limit": {"json_schema": json.dumps({"description": "x" * BIG})},
    "a regex of 130,000 characters": {"regex": _chars("ab|", BIG)},
    "minItems of 10^9": {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "null"}}},
    "minItems of 10^5": {
        "json_schema": {"type": "array", "minItems": 10**5, "maxItems": 10**6, "items": {"type": "null"}}
    },
    "minItems of 10^30": {"json_schema": {"type": "array", "minItems": 10**30}},
    "minItems within minItems": {
        "json_schema": {
            "type": "array",
            "minItems": 1_000,
            "items": {"type": "array", "minItems": 1_000, "items": {"type": "null"}},
        }
    },
    "minLength of 10^6": {"json_schema": {"type": "string", "minLength": 10**6, "maxLength": 10**7}},
    "minProperties of 10^6": {"json_schema": {"type": "object", "minProperties": 10**6}},
    "a number of 5,000 digits": {"json_schema": '{"type":"integer","minimum":' + "9" * 5_000 + "}"},
    "a range of 300 digits": {"json_schema": {"type": "number", "minimum": 1e-300, "maximum": 1e300}},
    "multiples of a large prime": {"json_schema": {"type": "integer", "multipleOf": 999_999_937}},
    "multiples of a tiny number": {"json_schema": {"type": "number", "multipleOf": 1e-300}},
    # Expressions that explode.
    "(a+)+b": {"json_schema": {"type": "string", "pattern": "^(a+)+b$"}},
    "(a?){50000}a{50000}": {"regex": "(a?){50000}a{50000}"},
    "((a{1,100}){1,100}){1,100}": {"regex": "((a{1,100}){1,100}){1,100}"},
    "(.*a){1000}": {"regex": "(.*a){1000}"},
    "[ab]*a[ab]{30}": {"regex": "[ab]*a[ab]{30}"},
    "many (.*)": {"regex": "(.*)" * 40 + "[0-9]{1,500}z"},
    "letters of any language 1,000 times": {"regex": r"\p{L}{1,1000}"},
    "(\\p{L}|\\p{N}|\\w|\\d){100000}": {"regex": r"(\p{L}|\p{N}|\w|\d){100000}"},
    "patterns of which none matches": {
        "json_schema": {"allOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}b.*$"} for n in range(30)]}
    },
    "expressions in and, not": {"grammar": "start: A\nA: /(.*a.{20}b)+/ & /(.*b.{21}a)+/ & ~/.*ab{15}.*/"},
    "200 patterns of properties": {
        "json_schema": {"patternProperties": {f"^a{n}.*b$": {"type": "null"} for n in range(200)}}
    },
    "a look-behind": {"regex": "(?<=a)b(?=c)"},
    "lark that repeats 10^9 times": {"grammar": 'start: a{0,1000000000}\na: "a" b\nb: "c"'},
    "lark that repeats 1000^3 times": {"grammar": "start: A{1000}\nA: B{1000}\nB: C{1000}\nC: /x/"},
    # Wrong.
    "null bytes": {"json_schema": {"const": "\0\ud83d\ude00\u202e\ufeff"}},
    "its own options": {
        "json_schema": {"x-guidance": {"lenient": True, "whitespace_pattern": "x"}, "uniqueItems": True}
    },
    "no JSON": {"json_schema": "{"},
}
