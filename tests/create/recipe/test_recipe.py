"""The recipe language: variables and expressions, overrides, stages' scopes, printing, files, and bad input."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.create.modifiers import modifier_named
from sparta.create.recipe import Entry, Recipe, Stage
from sparta.errors import FileFormatError, NameNotFoundError, SpartaError, ValueRangeError

FLAT = """
version: 1
metadata: {author: someone}
variables:
  end: ${start + num_epochs / 2}       # refers to variables defined further down
  start: ${quarter}
  quarter: ${num_epochs / 4}
  num_epochs: 20
  layers: ["0.weight", "re:2.*"]
  same_layers: ${layers}
  curve: linear
  mask: 2:4
  nothing: null
modifiers:
  - EpochRange: {start_epoch: 0, end_epoch: "${num_epochs}"}
  - MagnitudePruning:
      start_epoch: ${start}
      end_epoch: ${end}
      update_frequency: ${min(1, (end - start) / 20)}
      init_sparsity: 0.0
      final_sparsity: 0.5
      params: ${same_layers}
      inter_func: ${curve}
      mask_type: ${mask}
      layer_floor: ${nothing}
"""

STAGED = """
variables: {num_epochs: 8, rate: 0.1, half: "${num_epochs / 2}"}
stages:
  warm:
    modifiers:
      - EpochRange: {end_epoch: "${half}"}
      - SetLearningRate: {learning_rate: "${rate}"}
  prune:
    variables: {num_epochs: 20, own: "${num_epochs * 2}"}
    modifiers:
      - EpochRange: {start_epoch: "${half}", end_epoch: "${own}"}
"""


def test_expressions_reach_through_variables_in_any_order():
    prune = Recipe.from_yaml(FLAT).modifiers()[1]
    assert prune.epochs() == (5.0, 15.0)
    assert prune.update_frequency == 0.5
    assert prune.params == ["0.weight", "re:2.*"]
    assert (prune.inter_func, prune.mask_type, prune.layer_floor) == ("linear", "2:4", None)


def test_variables_can_be_asked_for():
    values = Recipe.from_yaml(FLAT).values()
    assert (values["start"], values["end"], values["same_layers"]) == (5.0, 15.0, ["0.weight", "re:2.*"])
    staged = Recipe.from_yaml(STAGED).values()
    assert (staged["half"], staged["prune.own"]) == (4.0, 40)


def test_stage_variables_shadow_the_recipes_in_the_stage_alone():
    warm, rate, prune = Recipe.from_yaml(STAGED).modifiers()
    assert warm.epochs() == (0.0, 4.0)
    assert rate.learning_rate == 0.1
    assert prune.epochs() == (4.0, 40.0)  # `half` is the recipe's own, and does not see the stage's num_epochs


def test_an_override_rescales_everything_that_hangs_on_it():
    recipe = Recipe.from_yaml(FLAT).override({"num_epochs": 8})
    assert recipe.max_epochs == 8
    assert recipe.modifiers()[1].epochs() == (2.0, 6.0)


@pytest.mark.parametrize("given", [{"num_epochs": 4}, '{"num_epochs": 4}', "num_epochs=4", "num_epochs: 4"])
def test_an_override_changes_every_definition_of_the_name(given):
    warm, _, prune = Recipe.from_yaml(STAGED).override(given).modifiers()
    assert (warm.epochs(), prune.epochs()) == ((0.0, 2.0), (2.0, 8.0))


def test_an_override_may_name_its_stage():
    warm, _, prune = Recipe.from_yaml(STAGED).override("prune.num_epochs=3,rate=0.5").modifiers()
    assert (warm.epochs(), prune.epochs()) == ((0.0, 4.0), (4.0, 6.0))


def test_an_override_may_be_an_expression_and_leaves_the_original_alone():
    recipe = Recipe.from_yaml(FLAT)
    changed = recipe.override({"start": "${num_epochs / 10}", "layers": ["0.weight"]})
    assert changed.modifiers()[1].start_epoch == 2.0
    assert recipe.modifiers()[1].start_epoch == 5.0
    assert changed.modifiers()[1].params == ["0.weight"]


def test_overrides_are_plain_data():
    recipe = Recipe.from_yaml(FLAT).override({"layers": ("0.weight",)})
    assert recipe.variables["layers"] == ["0.weight"]
    assert Recipe.from_yaml(str(recipe)) == recipe
    with pytest.raises(FileFormatError, match="the override of 'layers' holds a object"):
        recipe.override({"layers": object()})


def test_unknown_overrides_are_refused_with_the_names_there_are():
    with pytest.raises(NameNotFoundError, match="did you mean 'num_epochs'"):
        Recipe.from_yaml(FLAT).override({"num_epoch": 1})
    with pytest.raises(NameNotFoundError, match=r"prune\.num_epochs"):
        Recipe.from_yaml(STAGED).override({"warm.num_epochs": 1})
    with pytest.raises(ValueRangeError, match="name=value"):
        Recipe.from_yaml(FLAT).override("num_epochs")
    with pytest.raises(FileFormatError, match="JSON"):
        Recipe.from_yaml(FLAT).override("{num_epochs: 1}")


# ---------------------------------------------------------------------- steps


def test_times_may_be_counted_in_steps():
    recipe = Recipe.from_yaml("""
    variables: {warm: 100}
    modifiers:
      - EpochRange: {end_epoch: 10}
      - MagnitudePruning: {start_epoch: "${warm} steps", end_epoch: 500 steps, update_frequency: 1 step,
                           final_sparsity: 0.5}
      - SetLearningRate: {learning_rate: 0.1, start_epoch: "${250 / steps_per_epoch}"}
    """)
    _, prune, rate = recipe.modifiers(steps_per_epoch=50)
    assert (prune.epochs(), prune.update_frequency, rate.start_epoch) == ((2.0, 10.0), 0.02, 5.0)
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    with pytest.raises(ValueRangeError, match="pass steps_per_epoch"):
        recipe.modifiers()


def test_steps_mean_nothing_in_fields_that_are_no_times():
    recipe = Recipe.from_yaml("modifiers: [SetLearningRate: {learning_rate: 1 steps}]")
    with pytest.raises(ValueRangeError, match="learning_rate"):
        recipe.modifiers(steps_per_epoch=1)


# ---------------------------------------------------------------------- printing


@pytest.mark.parametrize("text", [FLAT, STAGED])
def test_a_printed_recipe_is_the_same_recipe(text):
    recipe = Recipe.from_yaml(text)
    again = Recipe.from_yaml(str(recipe))
    assert again == recipe
    assert str(again) == str(recipe)
    assert [one.fields() for one in again.modifiers()] == [one.fields() for one in recipe.modifiers()]
    assert "num_epochs / 2}" in str(recipe)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


NAMES = ["alpha", "beta", "gamma"]
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-1000, 1000), st.floats(-1e9, 1e9), st.sampled_from(["2:4", "1e-7", "no"])
)
amounts = (
    plain | st.lists(plain, max_size=2) | st.sampled_from(["${alpha}", "${-beta * 2}", "${max(alpha, 1) // gamma}"])
)
entries = st.lists(
    st.builds(
        Entry,
        st.sampled_from(["EpochRange", "SetLearningRate", "MagnitudePruning"]),
        st.dictionaries(st.sampled_from(["start_epoch", "end_epoch", "update_frequency"]), amounts, max_size=3),
    ),
    max_size=3,
).map(tuple)
variables = st.fixed_dictionaries(dict.fromkeys(NAMES, plain))  # all defined, so that every reference is good
notes = st.dictionaries(st.text(max_size=5), plain | st.text(max_size=20), max_size=2)


@st.composite
def recipes(draw):
    if draw(st.booleans()):
        return Recipe((Stage(None, draw(entries)),), draw(variables), draw(notes))
    count = draw(st.integers(1, 3))
    stages = []
    for place in range(count):
        after = draw(st.sampled_from([None, *(f"stage {earlier}" for earlier in range(place))]))
        own = {"delta": "${alpha}", **draw(st.dictionaries(st.sampled_from(NAMES), plain, max_size=2))}
        stages.append(Stage(f"stage {place}", draw(entries), own, draw(notes), after))
    return Recipe(tuple(stages), draw(variables), draw(notes))


@settings(max_examples=100, deadline=None)
@given(recipes())
def test_parse_print_parse_is_a_fixed_point(recipe):
    once = Recipe.from_yaml(recipe.to_yaml())
    assert once == recipe
    assert once.to_yaml() == recipe.to_yaml()


def test_modifiers_make_a_recipe_and_come_back_from_it():
    made = [
        modifier_named("EpochRange")(end_epoch=7),
        modifier_named("MagnitudePruning")(final_sparsity=0.5, mask_type="2:4", end_epoch=3, params=["a.weight"]),
        modifier_named("LearningRateFunction")(lr_func="cosine", init_lr=1e-3, final_lr=1e-7, end_epoch=7),
    ]
    recipe = Recipe.from_modifiers(made)
    assert [one.fields() for one in recipe.modifiers()] == [one.fields() for one in made]
    assert Recipe.from_yaml(str(recipe)) == recipe


def test_modifiers_are_fresh_each_time():
    recipe = Recipe.from_yaml(FLAT)
    assert recipe.modifiers()[0] is not recipe.modifiers()[0]


# ---------------------------------------------------------------------- files and metadata


def test_files(tmp_path):
    recipe = Recipe.from_yaml(FLAT)
    recipe.save(tmp_path / "recipe.yaml")
    assert Recipe.load(tmp_path / "recipe.yaml") == recipe
    (tmp_path / "card.md").write_text(f"---\n{recipe}---\n# A model\n")
    assert Recipe.load(tmp_path / "card.md") == recipe
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    assert Recipe.load(tmp_path / "recipe.json") == recipe


def test_bad_files(tmp_path):
    with pytest.raises(FileFormatError, match="check the path"):
        Recipe.load(tmp_path / "missing.yaml")
    (tmp_path / "recipe.txt").write_text(FLAT)
    with pytest.raises(FileFormatError, match=r"\.yaml"):
        Recipe.load(tmp_path / "recipe.txt")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match=r"bytes\.yaml"):
        Recipe.load(tmp_path / "bytes.yaml")
    (tmp_path / "broken.yaml").write_text("modifiers: [")
    with pytest.raises(FileFormatError, match=r"broken\.yaml"):
        Recipe.load(tmp_path / "broken.yaml")
    with pytest.raises(FileFormatError, match=r"ends in \.yaml"):
        Recipe.from_yaml(FLAT).save(tmp_path / "recipe.txt")


def test_metadata_is_kept_and_a_conflict_is_warned_of():
    recipe = Recipe.from_yaml(FLAT)
    assert recipe.metadata == {"author": "someone"}
    assert recipe.with_metadata({"task": "digits"}).metadata == {"task": "digits", "author": "someone"}
    with pytest.warns(UserWarning, match="author='someone', which stays"):
        assert recipe.with_metadata({"author": "other"}).metadata == {"author": "someone"}


# ---------------------------------------------------------------------- bad recipes


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (
            "variables: {a: '${b}', b: '${c + 1}', c: '${a}'}\nmodifiers: []",
            ValueRangeError,
            "circle: a -> b -> c -> a",
        ),
        ("variables: {a: '${a}'}\nmodifiers: []", ValueRangeError, "circle: a -> a"),
        ("variables: {a: '${missing * 2}'}\nmodifiers: []", NameNotFoundError, "in the variable 'a': unknown"),
        ("variables: {count: 1}\nmodifiers: [EpochRange: {end_epoch: '${coumt}'}]", NameNotFoundError, "mean 'count'"),
        ("stages: {x: {modifiers: [EpochRange: {end_epoch: '${n}'}]}}", NameNotFoundError, "of stage 'x'"),
        ("stages: {x: {variables: {n: '${m}'}, modifiers: []}}", NameNotFoundError, "variable 'm'"),
        ("modifiers: [EpochRang: {end_epoch: 1}]", NameNotFoundError, "did you mean 'EpochRange'"),
        ("modifiers: [EpochRange: {end_epoc: 1}]", NameNotFoundError, "did you mean 'end_epoch'"),
        ("modifiers: [EpochRange: 3]", FileFormatError, "its fields"),
        ("modifiers: [{EpochRange: {end_epoch: 1}, SetLearningRate: {}}]", FileFormatError, "one name an item"),
        ("modifiers: [3]", FileFormatError, "the modifier 3"),
        ("modifiers: {EpochRange: {end_epoch: 1}}", FileFormatError, "a list"),
        ("modifers: []", NameNotFoundError, "did you mean 'modifiers'"),
        ("variables: {}", FileFormatError, "neither"),
        ("modifiers: []\nstages: {}", FileFormatError, "both"),
        ("stages: {}", ValueRangeError, "stages"),
        ("stages: {a.b: {modifiers: []}}", ValueRangeError, "without a dot"),
        ("stages: {a: {modifers: []}}", NameNotFoundError, "did you mean 'modifiers'"),
        ("stages: {a: {after: b, modifiers: []}}", ValueRangeError, "comes after 'b'"),
        ("stages: {a: {after: 3, modifiers: []}}", FileFormatError, "earlier stage"),
        ("stages: [a]", FileFormatError, "a mapping"),
        ("variables: [a]\nmodifiers: []", FileFormatError, "a mapping"),
        ("version: 2\nmodifiers: []", FileFormatError, "upgrade"),
        ("version: 1.0\nmodifiers: []", FileFormatError, "version 1.0"),
        ("[1, 2]", FileFormatError, "list"),
        ("", FileFormatError, "NoneType"),
        ("variables: {min: 1}\nmodifiers: []", ValueRangeError, "function's name"),
        ("variables: {a b: 1}\nmodifiers: []", ValueRangeError, "letters"),
        ("variables: {steps_per_epoch: 1}\nmodifiers: []", ValueRangeError, "just use it"),
        ("variables: {a: 1, b: 'x ${a}'}\nmodifiers: []", ValueRangeError, "in its middle"),
        ("variables: {a: '${1 +}'}\nmodifiers: []", ValueRangeError, "expected a number"),
    ],
)
def test_a_bad_recipe_is_refused_when_it_is_read(text, error, says):
    with pytest.raises(error, match=says):
        Recipe.from_yaml(text)


def test_bad_values_name_the_modifier_and_the_stage():
    recipe = Recipe.from_yaml("stages: {first: {variables: {n: text}, modifiers: [EpochRange: {end_epoch: '${n}'}]}}")
    with pytest.raises(ValueRangeError, match="stage 'first': end_epoch of EpochRange is 'text'"):
        recipe.modifiers()
    with pytest.raises(ValueRangeError, match="a number"):
        Recipe.from_yaml("variables: {n: text}\nmodifiers: [EpochRange: {end_epoch: '${n + 1}'}]").modifiers()


def test_an_old_eval_is_no_expression_in_a_new_recipe():
    recipe = Recipe.from_yaml("modifiers: [EpochRange: {end_epoch: eval(3)}]")
    with pytest.raises(ValueRangeError, match="end_epoch"):
        recipe.modifiers()


def test_a_modifier_without_fields_may_be_a_bare_name():
    recipe = Recipe.from_yaml("modifiers: [SparsificationLogging]")
    assert recipe.stages[0].entries == (Entry("SparsificationLogging", {}),)


def test_negative_expressions_work():
    recipe = Recipe.from_yaml("variables: {x: 1}\nmodifiers: [EpochRange: {start_epoch: '${-x}', end_epoch: 2}]")
    assert recipe.modifiers()[0].start_epoch == -1


odd = st.recursive(
    st.sampled_from([None, True, 3, -1.5, "text", "${x}", "${x + 1}", "x ${x}", "3 steps", "2:4", "EpochRange"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["x", "EpochRange", "modifiers", "after", "end_epoch"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["version", "metadata", "variables", "modifiers", "stages"]), odd, max_size=4),
)
def test_whatever_a_recipe_holds_it_is_read_or_refused(data):
    with contextlib.suppress(SpartaError):
        recipe = Recipe.from_dict(data)
        assert Recipe.from_yaml(str(recipe)) == recipe
        recipe.modifiers(steps_per_epoch=3)


def test_recipes_that_are_short_and_stand_for_much_are_refused():
    doubling = ["v0: [1]"] + [f"v{n + 1}: ['${{v{n}}}', '${{v{n}}}']" for n in range(30)]
    recipe = Recipe.from_yaml(f"variables: {{{', '.join(doubling)}}}\nmodifiers: []")
    with pytest.raises(FileFormatError, match="too large"):
        recipe.values()
    names = ", ".join(["fc.weight"] * 20_000)
    entries = "- ConstantPruning: {params: '${names}'}\n" * 10
    recipe = Recipe.from_yaml(f"variables: {{names: [{names}]}}\nmodifiers:\n{entries}")
    with pytest.raises(FileFormatError, match="too large"):
        recipe.modifiers()


def test_chains_of_variables_may_be_long():
    chain = ", ".join(f"v{n}: '${{v{n + 1} + 1}}'" for n in range(3000))
    recipe = Recipe.from_yaml(f"variables: {{{chain}, v3000: 0}}\nmodifiers: []")
    assert recipe.values()["v0"] == 3000


def test_errors_of_a_recipe_name_its_file(tmp_path):
    for text in ("variables: {a: '${b}'}\nmodifiers: []", "modifiers: [Nothing]", "a: !!int x", "[", "modifiers: 3"):
        (tmp_path / "my.yaml").write_text(text)
        with pytest.raises(SpartaError, match=r"my\.yaml"):
            Recipe.load(tmp_path / "my.yaml")


@pytest.mark.parametrize("text", ["{", "{]", '{"a": 1, "a": 2}', "{" * 9, '{"a":' * 5000])
def test_overrides_that_are_no_json_are_errors_of_ours(text):
    with pytest.raises(SpartaError, match="overrides"):
        Recipe.from_yaml("variables: {a: 1}\nmodifiers: []").override(text)
