"""Where questions, documents and rewards come from: the synthetic world, the benchmarks, and scripted
players."""

from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document, read_corpus
from stppo.world.benchmark_world import BenchmarkWorld
from stppo.world.datasets import read_records
from stppo.world.encoding import DialogueEncoder
from stppo.world.environment import Episode, SearchEnvironment, Turn
from stppo.world.knowledge import SyntheticWorld
from stppo.world.protocol import Action, Protocol, Question, parse_turn
from stppo.world.records import BENCHMARKS
from stppo.world.rewards import exact_match, f1, mean_by_source, normalise_answer, score, search_r1_em
from stppo.world.scripted import DemonstrationNoise, play, play_summary
from stppo.world.turn_rewards import TurnRewards

__all__ = [
    "BENCHMARKS",
    "Action",
    "BM25Retriever",
    "BenchmarkWorld",
    "DemonstrationNoise",
    "DialogueEncoder",
    "Document",
    "Episode",
    "Protocol",
    "Question",
    "SearchEnvironment",
    "SyntheticWorld",
    "Turn",
    "TurnRewards",
    "exact_match",
    "f1",
    "mean_by_source",
    "normalise_answer",
    "parse_turn",
    "play",
    "play_summary",
    "read_corpus",
    "read_records",
    "score",
    "search_r1_em",
]
