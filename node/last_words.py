"""What is said of a mesh that cannot go on: the verdict, earlier tries, and the last lines of the guilty."""

from __future__ import annotations

from mlx_mesh.mesh.errors import BringUpError, MeshError
from mlx_mesh.mesh.membership import RestartBudget, Verdict
from mlx_mesh.node.roster import Roster
from mlx_mesh.node.stacks import where_it_stood, without_stacks

_NUM_LINES = 15


def stacks_of(roster: Roster) -> str:
    """Where the engines of the epoch that was just ended stood, as far as they said so."""
    stood = [(record.rank, where_it_stood(tuple(record.lines))) for record in roster.ranks]
    return "".join(f"; rank {rank} stood in {where}" for rank, where in stood if where)


def final_error(roster: Roster, verdict: Verdict, budget: RestartBudget) -> MeshError:
    """The error that ends the mesh."""
    text = str(verdict)
    if not text.endswith("."):
        text += "."
    if budget.num_failed > 1:
        text += f" That was try {budget.num_failed}"
        first = budget.first_cause
        text += f"; the first ended with: {first}." if first != str(verdict) else "."
    guilty = [
        record
        for record in roster.ranks
        if record.rank == verdict.rank
        or (verdict.rank is None and roster.host_of(record.rank) == verdict.host)
    ]
    for record in guilty:
        lines = without_stacks(record.last_lines())[-_NUM_LINES:]
        if where := where_it_stood(record.last_lines()):
            lines.append(f"it stood in {where}")
        if lines:
            text += f"\nLast lines of rank {record.rank}:\n  " + "\n  ".join(lines)
    if budget.was_ready:
        return MeshError(f"the mesh cannot go on: {text}")
    return BringUpError(f"the mesh did not come up: {text}")
