"""``sparta train``: a recipe around a training script, which stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sparta.cli.console import AsJson, app, user_errors
from sparta.errors import FileFormatError, ValueRangeError, message


@app.command("train", context_settings={"allow_interspersed_args": False})
def train_script(
    recipe: Annotated[Path, typer.Argument(help="A recipe; sparta recipe new writes one.")],
    script: Annotated[Path, typer.Argument(help="Your training script, run as Python runs it.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    *,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the trained weights here (.safetensors), and their spec.")
    ] = None,
    steps_per_epoch: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps of an epoch; by default as long as the loader.")
    ] = None,
    accumulation: Annotated[int, typer.Option(min=1, help="Batches whose gradients are summed for one step.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Run a training script with a recipe around it: its model is pruned while it trains, by its own steps.

    Options come before the recipe; what follows the script is the script's own.
    """
    with user_errors():
        from sparta.cli.around import ScriptError, Training, check_script, run_script
        from sparta.create import Recipe

        chosen = Recipe.load(recipe)
        check_script(script)
        if out is not None and not out.absolute().parent.is_dir():
            raise FileFormatError(message(f"cannot write {out}: its folder does not exist", fix="create it first"))
        training = Training(chosen, steps_per_epoch, accumulation)
        try:
            with training.watched():
                run_script(script, list(arguments or ()))
        except ScriptError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error
        if training.manager is None:
            raise ValueRangeError(
                message(f"{script} trained nothing: no optimizer stepped", fix="run the training where it is imported")
            )
        training.manager.finalize()
        facts = _facts(training, out)
        typer.echo(json.dumps(facts, indent=2) if as_json else _text(facts))


def _facts(training: Any, out: Path | None) -> dict[str, Any]:
    """Return what came of a training, and write its weights where that was asked for."""
    from safetensors.torch import save

    from sparta.files import write_atomic

    spec = training.manager.spec()
    facts: dict[str, Any] = {
        "model": type(training.model).__name__,
        "epochs": training.manager.epoch,
        "planned_epochs": training.manager.max_epochs,
        "tensors": len(spec),
        "zeros": 1 - spec.density if len(spec) else 0.0,
    }
    if out is not None:
        spec_file = out.with_name(f"{out.stem}.spec.safetensors")
        tensors = {name: t.detach().cpu().clone().contiguous() for name, t in training.model.state_dict().items()}
        write_atomic(out, save(tensors))
        spec.save(spec_file)
        facts |= {"out": str(out), "spec": str(spec_file)}
    return facts


def _text(facts: dict[str, Any]) -> str:
    done = f"{facts['epochs']:.2f} of {facts['planned_epochs']} epochs of the recipe"
    text = f"{facts['model']}: {done}, {facts['tensors']} tensors with {facts['zeros']:.1%} zeros"
    return f"{text}\nwrote {facts['out']} and {facts['spec']}" if "out" in facts else text
