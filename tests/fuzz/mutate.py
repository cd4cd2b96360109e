"""A plain mutator: one good file in, one bad file out, by a seed. Checksums are put right again, as an attacker would.

Binary files get flipped bits and cut ends; files that hold JSON are mostly changed as JSON (numbers, texts, shapes,
nesting, keys), which gets far deeper into a reader; texts get their tokens changed.
"""

import copy
import hashlib
import json
import re

CANARY = "sparta_fuzz_canary"
CODE = f"__import__('{CANARY}')"
NUMBERS = [0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, -(2**63), -5, 0.5, -0.0, 1e308]
NUMBERS += [float("inf"), float("nan"), 1e-320, 10**4000]
TEXTS = [
    "",
    " ",
    "0",
    "²",
    "-1",
    "x",
    "..",
    "../../x",
    "a.b",
    "__class__",
    "__init__",
    "forward",
    "None",
    "\x00",
    "\ud800",
    "é" * 50,
]
TEXTS += [
    CODE,
    f"x, _={CODE}",
    f"a={CODE}, b",
    CANARY,
    f"{CANARY}.f",
    f"${{{CODE}}}",
    "dense",
    "cpu",
    "cuda",
    "meta",
    "x" * 10_000,
]
TEXTS += ["aten.relu.default", "aten.empty.memory_format", "aten.save.default", "sparta.subgraph.default", "prim.print"]
TEXTS += [
    "float32",
    "int64",
    "bool",
    "complex64",
    "fp32",
    "int8",
    "${round(15, -99999999)}",
    "${9**9**9}",
    "${a}",
    "100 steps",
]
SHAPES = [[], [0], [1], [-1], [2**31, 2**31], [2**62], [32768, 32768], [1] * 70, [0, 2**62], [1.5], ["3"], None, [[1]]]
VALUES = [None, True, False, [], {}, [[]], {"a": {}}, {"node": "x"}, {"dtype": "float32"}, {"dict": {}}, [None] * 3]
YAML = [
    "!!int x",
    "!!bool zz",
    "!!python/object/apply:os.system [x]",
    "&a [*a]",
    "{<<: *a}",
    "[[[[",
    "}",
    ": :",
    "- - -",
    "~",
    "<<",
]
YAML += [
    "!!timestamp x",
    "!!set {a}",
    "? a",
    "|",
    ">",
    "%TAG",
    "---",
    "'",
    '"',
    "\t",
    "1e999",
    ".nan",
    "0x" + "f" * 900,
    "${",
    "}}",
]


def mutated(data, name, chance):
    """Return the bytes of a bad file made from those of a good one.

    Parameters
    ----------
    name
        Of the good file; its ending tells what it is made of.
    chance
        A seeded ``random.Random``.
    """
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if name.endswith((".yaml", ".md")):
            data = _text(data, chance) if chance.random() < 0.85 else _binary(data, chance)
        elif name.endswith((".export", ".entry")):
            data = _json_file(data, chance) if chance.random() < 0.85 else _binary(data, chance)
        else:
            data = _container(data, chance) if chance.random() < 0.9 else _binary(data, chance)
    return data


def _binary(data, chance):
    """Flip bits, cut, or put in bytes anywhere."""
    place = chance.randrange(len(data) + 1)
    start = chance.choice([0, 1, 2**63, 2**64 - 1, len(data), max(0, len(data) - 8)]).to_bytes(8, "little")
    flipped = bytearray(data)
    for _ in range(chance.choice([1, 1, 8]) if data else 0):
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return chance.choice(
        [
            data[:place],
            data[:place] + chance.randbytes(chance.randrange(1, 40)) + data[place:],
            data[:place] + data[place + chance.randrange(1, 200) :],
            start + data[8:],
            bytes(flipped),
        ]
    )


def _container(data, chance):
    """Change the header, the payload or the tensors of a file of ours; its checksum is right again afterwards."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
        metadata = header["__metadata__"]
        payload = json.loads(metadata["payload"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return _binary(data, chance)
    body = bytearray(data[8 + size :])
    kind = chance.random()
    if kind < 0.7:
        payload = _json(payload, chance)
        text = json.dumps(payload)
        metadata["payload"] = text if chance.random() > 0.02 else _deep(text, chance)
    elif kind < 0.85:
        header = _json(header, chance)
    elif body:
        for _ in range(chance.choice([1, 4, 64])):
            body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    return _signed(header, bytes(body), chance)


def _signed(header, body, chance):
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict) and chance.random() > 0.02:
        metadata.pop("sha256", None)
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        digest.update(body)
        metadata["sha256"] = digest.hexdigest()
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def _json_file(data, chance):
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return _binary(data, chance)
    text = json.dumps(_json(content, chance))
    return (text if chance.random() > 0.05 else _deep(text, chance)).encode()


def _deep(text, chance):
    count = chance.choice([90, 150, 3000, 100_000])
    return "[" * count + text + "]" * count if chance.random() < 0.5 else '{"a":' * count + text + "}" * count


def _json(value, chance):
    """Return a copy of a JSON value with one thing changed, anywhere in it."""
    changed = copy.deepcopy(value)
    places = list(_places(changed))
    if not places:
        return changed
    owner, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.1:
        del owner[key]
    elif kind < 0.2:
        other, other_key = chance.choice(places)
        owner[key] = copy.deepcopy(other[other_key])
    elif kind < 0.28 and isinstance(owner, dict):
        owner[chance.choice([*TEXTS, *owner])] = owner.pop(key)
    elif kind < 0.33 and isinstance(owner, list):
        owner.extend([copy.deepcopy(owner[key])] * chance.choice([1, 3, 200]))
    else:
        owner[key] = _other(owner[key], chance)
    return changed


def _other(value, chance):
    """Return a hostile value, most often of the same type."""
    if chance.random() < 0.25:
        return chance.choice([*NUMBERS, *TEXTS, *SHAPES, *VALUES])
    if isinstance(value, str):
        place = chance.randrange(len(value) + 1)
        edited = value[:place] + chance.choice([*"0aZ_.:/ 'é", "", CODE]) + value[place + 1 :]
        return edited if chance.random() < 0.4 else chance.choice(TEXTS)
    if isinstance(value, int | float):  # numbers, and true and false
        near = [value + 1, value - 1, value * 2, -value, value * 1000, not value]
        return chance.choice([*NUMBERS, *near, *near])
    if isinstance(value, list):
        return chance.choice([*SHAPES, value * 2, value[::-1], value[:-1], [value]])
    return chance.choice([*VALUES, [value], {"a": value}])


def _places(value):
    """Yield (owner, key) of everything inside a JSON value, without recursion."""
    waiting = [value]
    while waiting:
        owner = waiting.pop()
        if isinstance(owner, dict | list):
            for key in owner if isinstance(owner, dict) else range(len(owner)):
                yield owner, key
                waiting.append(owner[key])


def _text(data, chance):
    """Change a token or a line of a text."""
    text = data.decode(errors="replace")
    tokens = re.findall(r"\w+|[^\w\s]+|\s+", text) or [""]
    place = chance.randrange(len(tokens))
    kind = chance.random()
    if kind < 0.15:
        del tokens[place]
    elif kind < 0.3:
        tokens[place] = chance.choice(tokens)
    elif kind < 0.4:
        tokens[place] *= chance.choice([2, 50, 3000])
    elif kind < 0.6:
        tokens[place] = str(chance.choice([number for number in NUMBERS if number != 10**4000]))
    elif kind < 0.8:
        tokens[place] = chance.choice(YAML)
    else:
        tokens[place] = chance.choice(TEXTS)
    return "".join(tokens).encode(errors="replace")
