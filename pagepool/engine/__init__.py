"""An engine: a model, a scheduler and one thread that runs all steps."""

from pagepool.engine.engine import Engine
from pagepool.engine.generation import Generation, PromptToken, Token
from pagepool.engine.sampling import SamplingParams
from pagepool.engine.structured import Structured

__all__ = ["Engine", "Generation", "PromptToken", "SamplingParams", "Structured", "Token"]
