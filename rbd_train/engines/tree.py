"""Many prompts and their choices in one forward pass: a trie of tokens, in which what is shared is computed once.

A document that is judged in four ranges, on three dimensions, in sixteen summaries stands in the trie once. Each token
attends to its ancestors alone and sits at its depth, so that every path is computed as if it stood by itself.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rbd_train.errors import DataError
from rbd_train.records import Position, Readings, Step

if TYPE_CHECKING:
    import torch

TREE_TOKENS = 1536  # of one pass: attention is computed between all of them, shared or not
TOP = 20  # likeliest first tokens that are kept, as APIs give


class Asked(NamedTuple):
    """A context, its choices, and the temperatures of the normalisers."""

    context: list[int]
    choices: list[list[int]]
    temperatures: tuple[float, ...]


class Tree(NamedTuple):
    """A trie laid out in a row; `children[i]` maps a token to the node that follows node i (-1: the root)."""

    tokens: list[int]
    depths: list[int]
    parents: list[int]
    children: dict[tuple[int, int], int]

    def plant(self, path: Sequence[int], start: int = -1) -> int:
        """Add a path below a node and return its last node."""
        node = start
        for token in path:
            found = self.children.get((node, token))
            if found is None:
                found = self.children[node, token] = len(self.tokens)
                self.depths.append(self.depths[node] + 1 if node >= 0 else 0)
                self.tokens.append(token)
                self.parents.append(node)
            node = found
        return node

    def mask(self, dtype: "torch.dtype") -> "torch.Tensor":
        """Return what is added to attention scores: 0 for a node and its ancestors; shape (1, 1, nodes, nodes)."""
        import torch

        seen = torch.zeros(len(self.tokens), len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] = seen[parent]
            seen[node, node] = True
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def plan(rows: Sequence[int], asked: dict[int, Asked], limit: int) -> Iterator[list[int]]:
    """Yield batches whose tries have at most `limit` tokens; neighbours in order share the most.

    One that begins with a longer context takes what shares it too: alone, each of its neighbours would pay for it anew.
    """
    batch: list[int] = []
    size, last, room = 0, list[int](), limit
    for row in sorted(rows, key=lambda i: (asked[i].context, i)):
        context, choices, _ = asked[row]
        tails = sum(len(choice) - 1 for choice in choices)
        added = len(context) - _common(last, context) + tails
        if batch and size + added > room:
            yield batch
            batch, size, added = [], 0, len(context) + tails
        if not batch:
            room = max(limit, len(context) + limit // 2)
        batch.append(row)
        size += added
        last = context
    if batch:
        yield batch


def read(model: Any, tokenizer: Any, batch: Sequence[Asked], vocabulary: int) -> list[Readings]:
    """Run one pass and read every choice; only the logits of places where a choice goes on are computed.

    Args:
        model: a causal language model whose layers attend to everything before.
        tokenizer: to write down the likeliest tokens.
        batch: what shares a pass.
        vocabulary: real ids; logits beyond are table padding and mean nothing (QwenLM/Qwen3#466).

    Raises:
        DataError: two choices of a context share their tokens, or log-probabilities are not finite.
    """
    import torch

    tree = Tree([], [], [], {})
    paths: list[list[list[int]]] = []  # per context and choice: the nodes that predict its tokens
    for context, choices, _ in batch:
        if len(set(map(tuple, choices))) < len(choices):
            raise DataError(f"two choices have the same tokens: {[tokenizer.decode(c) for c in choices]!r:.200}")
        root = tree.plant(context)
        paths.append([_nodes(tree, root, choice) for choice in choices])
    wanted = sorted({node for choices in paths for nodes in choices for node in nodes})
    row_of = {node: row for row, node in enumerate(wanted)}
    device, dtype = model.device, model.dtype
    logits = model(
        input_ids=torch.tensor([tree.tokens], device=device), attention_mask=tree.mask(dtype).to(device),
        position_ids=torch.tensor([tree.depths], device=device), use_cache=False,
        logits_to_keep=torch.tensor(wanted, device=device),
    ).logits[0, :, :vocabulary].float()  # fmt: skip
    logprobs = logits.log_softmax(-1)  # (places, vocabulary)
    if not torch.isfinite(logprobs).all():
        raise DataError(f"log-probabilities are not finite in {dtype}; try dtype=float32")
    temperatures = sorted({t for part in batch for t in part.temperatures})
    normalisers = {t: (logprobs / t).logsumexp(-1).tolist() for t in temperatures}
    likeliest = logprobs.topk(min(1000, logprobs.shape[-1]), dim=-1)
    best, thousandth = likeliest.values[:, 0].tolist(), likeliest.values[:, -1].tolist()
    readings = []
    for (_, choices, own), nodes in zip(batch, paths, strict=True):
        places = list(dict.fromkeys(node for path in nodes for node in path))
        first = row_of[nodes[0][0]]
        tokens = [
            torch.tensor([[row_of[node], token] for node, token in zip(path, choice, strict=True)], device=device)
            for path, choice in zip(nodes, choices, strict=True)
        ]
        readings.append(
            Readings(
                choices=tuple(
                    _steps(path, places, logprobs[at[:, 0], at[:, 1]].tolist(), logprobs[first, at[:, 1]].tolist())
                    for path, at in zip(nodes, tokens, strict=True)
                ),
                positions=tuple(
                    Position(
                        normalisers=tuple(normalisers[t][row_of[node]] for t in own), best=best[row_of[node]],
                        thousandth=thousandth[row_of[node]],
                    )
                    for node in places
                ),
                top=_top(tokenizer, likeliest.indices[first], likeliest.values[first]),
            )
        )  # fmt: skip
    return readings


def _nodes(tree: Tree, root: int, choice: Sequence[int]) -> list[int]:
    nodes = [root]
    for token in choice[:-1]:
        nodes.append(tree.plant([token], nodes[-1]))
    return nodes


def _steps(path: Sequence[int], places: list[int], own: Sequence[float], first: Sequence[float]) -> tuple[Step, ...]:
    return tuple(
        Step(position=places.index(node), logprob=value, first=stale)
        for node, value, stale in zip(path, own, first, strict=True)
    )


def _top(tokenizer: Any, ids: "torch.Tensor", values: "torch.Tensor") -> dict[str, float]:
    found: dict[str, float] = {}
    for token, value in zip(ids[:TOP].tolist(), values[:TOP].tolist(), strict=True):
        found.setdefault(tokenizer.decode([token]), value)
    return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
