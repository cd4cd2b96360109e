"""Generation: language models of transformers, compiled with their `generate`.

`decoder` finds out what a model is made of, `matrices` packs its weights, `program` runs its steps in C++; `layers`
puts sparse kernels into models that are no such decoder. `api` compiles, `artifact` saves and loads. transformers is
imported only where a model of it is at hand.
"""

from sparta.arguments import front_door
from sparta.generation.api import compile_generator, generates
from sparta.generation.artifact import load_generator
from sparta.generation.model import GenerativeModel

__all__ = ["GenerativeModel", "compile_generator", "generates", "load_generator"]

front_door(globals(), ["compile_generator", "generates", "load_generator"])
