"""Recipes written for SparseML and llm-compressor: read, converted where conventions differ, refused by name."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.create.recipe import Recipe
from sparta.create.recipe.document import Tagged
from sparta.errors import FileFormatError, NameNotFoundError, SpartaError, ValueRangeError

FLAT = """
version: 1.1.0
__metadata__: {framework: pytorch}

num_epochs: &num_epochs 20
init_lr: 1e-3
pruning_end: eval(num_epochs - num_qat_epochs)
num_qat_epochs: eval(num_epochs * 0.25)
layers: ["0.weight", re:2.weight]
nothing: null

training_modifiers:
  - !EpochRangeModifier
    start_epoch: 0.0
    end_epoch: *num_epochs
  - !LearningRateFunctionModifier
    lr_func: linear
    init_lr: eval(init_lr)
    final_lr: 1.e-7
    start_epoch: 0
    end_epoch: eval(num_epochs)

pruning_modifiers:
  - !GMPruningModifier
    params: eval(layers)
    init_sparsity: 0.05
    final_sparsity: 0.8
    start_epoch: eval(-(-0.0))
    end_epoch: eval(pruning_end)
    update_frequency: 1.0
    mask_type: 2:4
    global_sparsity: False
    log_types: __ALL__

quantization_modifiers:
  - !QuantizationModifier
    start_epoch: eval(pruning_end)
    submodules: ["0", "2"]
    freeze_bn_stats_epoch: eval(pruning_end + 1)
    activation_bits: 8
    weight_bits: 4
"""

STAGED = """
num_epochs: 4
dense_stage:
  num_epochs: 2
  modifiers:
    - !EpochRangeModifier {start_epoch: 0, end_epoch: eval(num_epochs)}
prune:
  __metadata__: {level: 1}
  pruning_modifiers:
    - !MagnitudePruningModifier
      params: ['re:.*conv', 're:.*fc.weight$', 're:layer.*', 're:a|b']
      init_sparsity: __FROM_PARAM__
      final_sparsity: 0.9
      start_epoch: 2
      end_epoch: eval(num_epochs)
      update_frequency: 0.5
"""


def test_a_flat_recipe_is_read():
    recipe = Recipe.from_yaml(FLAT)
    span, rate, prune, quantize = recipe.modifiers()
    assert span.epochs() == (0.0, 20.0)
    assert (rate.init_lr, rate.final_lr) == (1e-3, 1e-7)
    assert (prune.name, prune.end_epoch, prune.mask_type) == ("GMPruning", 15.0, "2:4")
    assert (quantize.start_epoch, quantize.freeze_bn_stats_epoch, quantize.submodules) == (15.0, 16.0, ["0", "2"])
    assert quantize.scheme["weights"]["num_bits"] == 4
    assert recipe.metadata == {"framework": "pytorch", "version": "1.1.0"}
    assert recipe.variables["nothing"] is None


def test_an_old_recipe_becomes_a_new_one():
    recipe = Recipe.from_yaml(FLAT)
    assert Recipe.from_yaml(str(recipe)) == recipe
    assert "eval(" not in str(recipe)
    assert "!" not in str(recipe)
    assert recipe.override("num_epochs=40").modifiers()[2].end_epoch == 30.0


def test_markdown_with_front_matter_and_a_licence_on_top():
    text = f"<!--\nA licence.\n-->\n\n---\n{FLAT}\n---\n\n# The model\n"
    assert Recipe.from_yaml(text) == Recipe.from_yaml(FLAT)


def test_a_staged_recipe_is_read():
    recipe = Recipe.from_yaml(STAGED)
    assert [stage.name for stage in recipe.stages] == ["dense_stage", "prune"]
    assert [one.epochs() for one in recipe.modifiers()] == [(0.0, 2.0), (2.0, 4.0)]
    assert recipe.stages[1].metadata == {"level": 1}
    assert recipe.override({"num_epochs": 8}).max_epochs == 8


def test_patterns_that_matched_a_beginning_match_a_whole_name():
    params = Recipe.from_yaml(STAGED).modifiers()[1].params
    assert params == ["re:(?:.*conv).*", "re:.*fc.weight$", "re:layer.*", "re:(?:a|b).*"]


def test_sparsities_by_name():
    fields = "{params: [], init_sparsity: 0, final_sparsity: {0.5: ['re:a'], 0.75: [b.weight]}, end_epoch: 1}"
    prune = Recipe.from_yaml(f"modifiers: [!MagnitudePruningModifier {fields}]").modifiers()[0]
    assert prune.final_sparsity == {0.5: ["re:(?:a).*"], 0.75: ["b.weight"]}


def test_scores_of_old_modifiers_choose_the_new_ones():
    text = "modifiers:\n  - !GMPruningModifier {score_type: %s, final_sparsity: 0.5, end_epoch: 1, params: __ALL__}"
    assert Recipe.from_yaml(text % "movement").modifiers()[0].name == "MovementPruning"
    assert Recipe.from_yaml(text % "MFAC").modifiers()[0].name == "MFACPruning"
    assert Recipe.from_yaml(text % "magnitude").modifiers()[0].name == "GMPruning"
    assert Recipe.from_yaml(text.replace("!GMP", "!LegacyGMP") % "magnitude").modifiers()[0].name == "GMPruning"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("modifiers: [!EpochRangModifier {end_epoch: 1}]", NameNotFoundError, "'EpochRangModifier'; did you mean"),
        ("modifiers: [!ASRegModifier {alpha: 1}]", NameNotFoundError, "unknown modifier 'ASRegModifier'"),
        ("stuff: [!EpochRangeModifier {end_epoch: 1}]", FileFormatError, "`modifiers` in their name"),
        ("modifiers: [!EpochRangeModifier {end_epoch: 1}, 3]", FileFormatError, "!Tag"),
        ("modifiers: [!EpochRangeModifier {stop: 1}]", NameNotFoundError, "field of EpochRange"),
        ("modifiers: [!EpochRangeModifier {end_epoch: eval(missing)}]", NameNotFoundError, "missing"),
        ("modifiers: [!EpochRangeModifier {end_epoch: eval(__import__('os'))}]", ValueRangeError, "expression"),
        ("a: eval(b)\nb: eval(a)\nmodifiers: [!EpochRangeModifier {end_epoch: 1}]", ValueRangeError, "circle"),
        (
            "modifiers: [!EpochRangeModifier {end_epoch: 1}]\ns: {modifiers: [!EpochRangeModifier {end_epoch: 1}]}",
            FileFormatError,
            "outside them",
        ),
        ("modifiers: [!QuantizationModifier {submodule: [a]}]", NameNotFoundError, "did you mean 'submodules'"),
        ("modifiers: [!QuantizationModifier {reduce_range: true}]", ValueRangeError, "reduce_range"),
        ("modifiers: [!QuantizationModifier {tensorrt: true, weight_bits: 4}]", ValueRangeError, "8 bits"),
        ("modifiers: [!QuantizationModifier {scheme: default, weight_bits: 4}]", ValueRangeError, "before it"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(text, error, says):
    with pytest.raises(error, match=says):
        Recipe.from_yaml(text)


def test_old_quantization_fields():
    text = """
    modifiers:
      - !QuantizationModifier
        tensorrt: true
        exclude_module_types: [LayerNorm, Tanh]
        quantize_embeddings: false
        model_fuse_fn_name: no_fuse
    """
    with pytest.warns(UserWarning, match="model_fuse_fn_name"):
        quantize = Recipe.from_yaml(text).modifiers()[0]
    assert quantize.scheme == "tensorrt"
    assert quantize.ignore == ["Embedding"]  # the others are in floating point here in any case


def test_old_quantization_fields_may_be_expressions():
    text = """
    embeddings: eval(flag - 1)
    flag: 1
    part: null
    stage:
      bits: eval(flag * 4)
      modifiers:
        - !QuantizationModifier
          start_epoch: eval(flag)
          submodules: eval(part)
          quantize_embeddings: eval(embeddings)
          quantize_linear_activations: 0
          weight_bits: eval(bits)
          exclude_module_types: [LayerNorm, Mine, Conv2d]
    """
    recipe = Recipe.from_yaml(text)
    quantize = recipe.modifiers()[0]
    assert quantize.ignore == ["Mine", "Conv2d", "Embedding"]
    assert (quantize.submodules, quantize.scheme["weights"]["num_bits"]) == (None, 4)
    assert recipe.override({"flag": 3}).modifiers()[0].start_epoch == 3


def test_schemes_of_quantization():
    text = """
    modifiers:
      - !QuantizationModifier
        submodules: [""]
        ignore: [classifier, ReLU]
        scheme: {weights: {num_bits: 4, symmetric: true}}
        scheme_overrides: {ReLU: {input_activations: null}, head: {weights: null}, Conv2d: default}
    """
    quantize = Recipe.from_yaml(text).modifiers()[0]
    assert quantize.submodules is None
    assert quantize.ignore == ["classifier"]
    assert quantize.scheme_overrides == {"head": None, "Conv2d": "default"}
    with pytest.raises(ValueRangeError, match="class LayerNorm"):
        Recipe.from_yaml("modifiers: [!QuantizationModifier {scheme_overrides: {LayerNorm: default}}]")


def test_schedules_of_pytorch_count_from_the_start_of_their_window():
    text = """
    begin: 100
    modifiers:
      - !LearningRateModifier
        start_epoch: 100
        lr_class: MultiStepLR
        lr_kwargs: {milestones: [107, 114], gamma: 0.1}
        init_lr: 0.01
        constant_logging: False
      - !LearningRateModifier
        start_epoch: eval(begin)
        lr_class: MultiStepLR
        lr_kwargs: {milestones: [107, eval(begin + 3)], gamma: 0.1}
        init_lr: 0.01
      - !LearningRateModifier
        start_epoch: 40
        end_epoch: 100
        lr_class: CosineAnnealingWarmRestarts
        lr_kwargs: {lr_min: 1e-5, cycle_epochs: 60}
        init_lr: 0.005
    """
    steps, symbolic, restarts = Recipe.from_yaml(text).modifiers()
    assert steps.lr_kwargs == {"milestones": [7, 14], "gamma": 0.1}
    assert steps.rate_at(106.9) == pytest.approx(0.01)
    assert steps.rate_at(107) == pytest.approx(0.001)
    assert symbolic.lr_kwargs["milestones"] == [7, 3]
    assert restarts.rate_at(70) == pytest.approx((0.005 + 1e-5) / 2)


def test_how_gradients_were_sampled_is_left_out_with_a_warning():
    fields = "{final_sparsity: 0.5, end_epoch: 1, num_grads: 8, grad_sampler_kwargs: {a: 1}}"
    text = f"modifiers: [!OBSPruningModifier {fields}]"
    with pytest.warns(UserWarning, match="grad_sampler_kwargs of OBSPruningModifier left out: pass data="):
        assert Recipe.from_yaml(text).modifiers()[0].num_grads == 8


# ---------------------------------------------------------------------- llm-compressor

STAGES = """
sparsity_stage:
  run_type: oneshot
  sparsity_modifiers:
    MagnitudePruningModifier:
      init_sparsity: 0.0
      final_sparsity: 0.75
      start: 1.0
      end: 3.0
      update: 0.5
      mask_structure: "3:4"
      targets: ["re:model.layers.\\\\d+$", "lm_head", __ALL_PRUNABLE__, "re:model.embed"]
finetuning_stage:
  pruning_modifiers:
    ConstantPruningModifier: {targets: __ALL__, start: 3.0}
  quantization_modifiers:
    QuantizationModifier:
      ignore: [lm_head]
      config_groups:
        group_0:
          targets: [Linear]
          weights: {num_bits: 4, type: int, symmetric: true, strategy: channel, observer: minmax}
"""


def test_stages_are_read_and_the_meaning_of_n_of_m_is_converted():
    recipe = Recipe.from_yaml(STAGES)
    assert [stage.name for stage in recipe.stages] == ["sparsity", "finetuning"]
    prune, constant, quantize = recipe.modifiers()
    assert prune.mask_type == "1:4"  # three of four pruned there: one of four kept here
    assert (prune.epochs(), prune.update_frequency, prune.inter_func) == ((1.0, 3.0), 0.5, "cubic")
    assert prune.params == [
        r"re:(?:model.layers.\d+)(?:\..*)?\.weight",
        "lm_head.weight",
        "__ALL_PRUNABLE__",
        r"re:(?:model.embed).*\.weight",
    ]
    assert (constant.params, constant.start_epoch) == (["__ALL_PRUNABLE__"], 3.0)
    assert quantize.scheme == {"weights": {"num_bits": 4, "symmetric": True, "strategy": "channel"}}
    assert "lm_head" in quantize.ignore
    assert Recipe.from_yaml(str(recipe)) == recipe


def test_targets_that_are_parameters_stay_so():
    text = "a_stage: {b_modifiers: {ConstantPruningModifier: {targets: ['re:.*q_proj.weight', head.weight], start: 0}}}"
    assert Recipe.from_yaml(text).modifiers()[0].params == ["re:(?:.*q_proj.weight).*", "head.weight"]


def test_a_single_stage_is_a_flat_recipe_and_groups_may_stand_alone():
    text = "quant_stage: {quant_modifiers: {QuantizationModifier: {scheme: W8A16, targets: Linear}}}"
    recipe = Recipe.from_yaml(text)
    assert not recipe.is_staged
    assert Recipe.from_yaml("quant_modifiers: {QuantizationModifier: {scheme: W8A16}}") == recipe


def test_scales_for_each_token_are_warned_of():
    with pytest.warns(UserWarning, match="each token"):
        recipe = Recipe.from_yaml("a_stage: {b_modifiers: {QuantizationModifier: {scheme: W8A8}}}")
    assert recipe.modifiers()[0].scheme["input_activations"] == {"num_bits": 8}


def test_scales_for_each_token_in_groups_are_warned_of():
    group = "{weights: {num_bits: 8}, input_activations: {num_bits: 8, strategy: token, dynamic: true}}"
    with pytest.warns(UserWarning, match="each token"):
        recipe = Recipe.from_yaml(
            f"a_stage: {{b_modifiers: {{QuantizationModifier: {{config_groups: {{g: {group}}}}}}}}}"
        )
    assert recipe.modifiers()[0].scheme["input_activations"] == {"num_bits": 8, "strategy": "tensor"}


def test_groups_may_be_lists():
    text = "version: 1\na_stage: {b_modifiers: [ConstantPruningModifier: {}, QuantizationModifier: {scheme: W8A16}]}"
    assert [one.name for one in Recipe.from_yaml(text).modifiers()] == ["ConstantPruning", "Quantization"]


def test_no_structure_is_unstructured():
    text = "a_stage: {b_modifiers: {MagnitudePruningModifier: {final_sparsity: 0.5, mask_structure: '0:0'}}}"
    assert Recipe.from_yaml(text).modifiers()[0].mask_type == "unstructured"


def test_linear_is_read_as_all_prunable_layers_with_a_warning():
    with pytest.warns(UserWarning, match="target Linear"):
        recipe = Recipe.from_yaml("a_stage: {b_modifiers: {ConstantPruningModifier: {targets: [Linear]}}}")
    assert recipe.modifiers()[0].params == ["__ALL_PRUNABLE__"]


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("{SparseGTPModifier: {sparsity: 0.5}}", NameNotFoundError, "did you mean 'SparseGPTModifier'"),
        ("{MagnitudePruningModifer: {}}", NameNotFoundError, "did you mean 'MagnitudePruningModifier'"),
        ("{MagnitudePruningModifier: {mask_structure: '4:4', final_sparsity: 0.5}}", ValueRangeError, "N pruned of M"),
        ("{MagnitudePruningModifier: {apply_globally: true}}", ValueRangeError, "apply_globally"),
        ("{MagnitudePruningModifier: {scheduler_args: {a: 1}}}", ValueRangeError, "scheduler_args"),
        ("{MagnitudePruningModifier: {sparsity: 0.5}}", NameNotFoundError, "field of MagnitudePruning"),
        ("{ConstantPruningModifier: {targets: 3}}", FileFormatError, "targets is 3"),
        ("{ConstantPruningModifier: {targets: [Conv2d]}}", ValueRangeError, "is a class"),
        ("{ConstantPruningModifier: {ignore: [a]}}", ValueRangeError, "pass ignore= to initialize"),
        ("{QuantizationModifier: {scheme: NVFP4}}", ValueRangeError, "NVFP4"),
        ("{QuantizationModifier: {scheme: W8A16, config_groups: {}}}", ValueRangeError, "both"),
        ("{QuantizationModifier: {config_groups: {}}}", ValueRangeError, "a mapping from groups"),
        ("{QuantizationModifier: {scheme: W8A16, kv_cache_scheme: {num_bits: 8}}}", ValueRangeError, "keys and values"),
        ("{QuantizationModifier: {config_groups: {a: {weights: {type: float, num_bits: 4}}}}}", ValueRangeError, "int"),
        ("{QuantizationModifier: {config_groups: {a: {weights: {group_size: 128}}}}}", ValueRangeError, "each group"),
        ("{QuantizationModifier: {config_groups: {a: {weights: {bits: 1}}}}}", NameNotFoundError, "num_bits"),
        ("3", FileFormatError, "a mapping from modifiers"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(text, error, says):
    with pytest.raises(error, match=says):
        Recipe.from_yaml(f"a_stage: {{b_modifiers: {text}}}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a_stage: {b_modifiers: {}}\nother: {}", "other"),
        ("a_stage: {b_modifiers: {}, extra: 1}", "extra"),
        ("b_modifiers: {}\nextra: 1", "extra"),
    ],
)
def test_unknown_keys_are_refused(text, says):
    with pytest.raises(NameNotFoundError, match=says):
        Recipe.from_yaml(text)


def test_arguments_that_were_never_substituted_are_refused():
    with pytest.raises(FileFormatError, match="args"):
        Recipe.from_yaml("args: {a: 1}\na_stage: {b_modifiers: {}}")


# ---------------------------------------------------------------------- anything at all

odd = st.recursive(
    st.sampled_from([None, True, 3, -1.5, "text", "eval(x)", "re:(", "", "2:4", "Linear", "W8A8"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "weights", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
FIELDS = [
    *("start_epoch", "end_epoch", "start", "params", "targets", "ignore", "scheme", "scheme_overrides", "submodules"),
    *("config_groups", "lr_kwargs", "lr_class", "init_lr", "final_sparsity", "score_type", "mask_type", "weight_bits"),
    *("mask_structure", "update_scheduler", "exclude_module_types", "quantize_embeddings", "grad_sampler_kwargs"),
]
NAMES = ["EpochRange", "LearningRate", "GMPruning", "MagnitudePruning", "ConstantPruning", "Quantization", "Unknown"]
parts = st.dictionaries(st.sampled_from(FIELDS), odd, max_size=4)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(NAMES), fields=parts | odd, other=odd, tagged=st.booleans())
@pytest.mark.filterwarnings("ignore")
def test_whatever_an_old_recipe_holds_it_is_read_or_refused(name, fields, other, tagged):
    entry = Tagged(f"{name}Modifier", fields if isinstance(fields, dict) else {})
    named = {f"{name}Modifier": fields}
    data = {"x": other, "b_modifiers": [entry]} if tagged else {"a_stage": {"b_modifiers": named, "run_type": other}}
    with contextlib.suppress(SpartaError):
        recipe = Recipe.from_dict(data)
        assert Recipe.from_yaml(str(recipe)) == recipe
        assert recipe.modifiers()
