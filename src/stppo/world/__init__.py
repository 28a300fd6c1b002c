"""Where questions, documents and rewards come from: the synthetic world, the benchmarks, and scripted players."""

from stppo.world.datasets import BENCHMARKS, BenchmarkWorld, read_records
from stppo.world.environment import Episode, SearchEnvironment, Turn
from stppo.world.knowledge import SyntheticWorld
from stppo.world.protocol import Action, Protocol, Question, parse_turn
from stppo.world.retrieval import BM25Retriever, Document, read_corpus
from stppo.world.rewards import exact_match, f1, normalise_answer
from stppo.world.scripted import DemonstrationNoise, play, play_summary

__all__ = [
    "BENCHMARKS",
    "Action",
    "BM25Retriever",
    "BenchmarkWorld",
    "DemonstrationNoise",
    "Document",
    "Episode",
    "Protocol",
    "Question",
    "SearchEnvironment",
    "SyntheticWorld",
    "Turn",
    "exact_match",
    "f1",
    "normalise_answer",
    "parse_turn",
    "play",
    "play_summary",
    "read_corpus",
    "read_records",
]
