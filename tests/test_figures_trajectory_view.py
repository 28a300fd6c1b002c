import math
import re

import pytest

from stppo.figures.trajectory_view import DOWN, UP, boundary_strips, ladder, show_trajectories

PLAIN = {
    "question": "mentor of dorn ?",
    "answers": ["moss"],
    "reward": 1.0,
    "tokens": ["ask", "<search>", "dorn", "doc", "<answer>", "moss"],
    "agent_mask": [0, 1, 1, 0, 1, 1],
    "turn_ids": [-1, 0, 0, -1, 1, 1],
    "logprobs": [0.0, -0.1, -0.2, 0.0, -0.3, -0.4],
}
# Environment positions hold what no view may use.
MEASURED = PLAIN | {
    "token_ratio": [9.0, 2.0, 0.5, 9.0, 1.0, 1.21],
    "turn_ratio": [9.0, 1.0, 1.0, 9.0, 1.1, 1.1],
    "advantage": [99.0, 0.5, -2.0, 99.0, 0.0, 1.0],
    "clipped_token": [1, 1, 1, 1, 0, 0],
    "clipped_turn": [1, 0, 0, 1, 1, 0],
}


def body(view):
    return view.html.split("</style>")[1]


def spans(view):
    """Attributes of each agent token's element, by its place among the agent tokens."""
    return [
        dict(re.findall(r'(\w+)="([^"]*)"', tag)) for tag in re.findall(r"<span (title=[^>]*)>", body(view))
    ]


def rgb(color):
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


def background(span):
    return rgb(re.search(r"background-color:(#\w{6})", span["style"])[1])


def test_tooltip_and_marks_are_each_token_s_own():
    shown = spans(show_trajectories([MEASURED]))
    assert len(shown) == 4
    assert (
        "token ratio 0.500, turn ratio 1.000, advantage -2.000, clipped at token level" in shown[1]["title"]
    )
    assert "clipped" not in shown[3]["title"]
    assert [span.get("class") for span in shown] == ["clipped-token", "clipped-token", "clipped-turn", None]
    both = MEASURED | {"clipped_turn": [0, 1, 0, 0, 0, 0]}
    assert spans(show_trajectories([both]))[0]["class"] == "clipped-token clipped-turn"


def test_underline_tells_up_from_down_without_colour_and_fades_towards_one():
    styles = [span["style"] for span in spans(show_trajectories([MEASURED]))]
    kinds = [re.search(r"3px (\w+) rgba\((\d+),(\d+),(\d+),([\d.]+)\)", style).groups() for style in styles]
    assert (kinds[0][0], kinds[1][0], kinds[3][0]) == ("solid", "dotted", "solid")
    assert tuple(map(int, kinds[0][1:4])) == rgb(UP) and tuple(map(int, kinds[1][1:4])) == rgb(DOWN)
    up, down, one, little = (float(kind[4]) for kind in kinds)
    assert (
        up == down == 1.0
        and one == 0.0
        and little == pytest.approx(math.log(1.21) / math.log(1.5), abs=0.006)
    )


def test_ratio_colours_tell_up_from_down_and_are_white_at_one():
    record = MEASURED | {"token_ratio": [1.0, 4.0, 1e-9, 1.0, 1.0, 1.21]}
    shown = [background(span) for span in spans(show_trajectories([record], "token_ratio"))]
    full_up, full_down, one, little = shown
    assert one == (255, 255, 255) and little != one
    assert full_up[0] > full_up[2] and full_down[0] < full_down[2]  # orange, blue
    assert all(strong <= weak for strong, weak in zip(full_up, little, strict=True))


def test_advantage_colours_scale_with_the_largest_agent_token_in_view():
    other = MEASURED | {"advantage": [0.0, 4.0, 0.0, 0.0, 0.0, 0.0]}
    alone = [background(span) for span in spans(show_trajectories([MEASURED], "advantage"))]
    together = [background(span) for span in spans(show_trajectories([MEASURED, other], "advantage"))]
    assert alone[2] == (255, 255, 255)
    assert alone[1][0] < together[1][0]  # -2 is full blue alone, half of it beside 4


@pytest.mark.parametrize("name", ["token_ratio", "clipped_turn"])
def test_wrong_length_names_record_and_field(name):
    broken = MEASURED | {name: MEASURED[name][:-1]}
    with pytest.raises(ValueError, match=f"trajectory 1: {name} has 5 entries for 6 tokens"):
        show_trajectories([MEASURED, broken])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("answers", None),
        ("tokens", [None] * 6),
        ("turn_ids", [[1]] * 6),
    ],
)
def test_a_field_of_another_kind_is_named_with_its_record(field, value):
    with pytest.raises(ValueError, match=f"^trajectory 1: {field}.* = "):
        show_trajectories([PLAIN, PLAIN | {field: value}])


def test_colour_that_cannot_be_drawn():
    with pytest.raises(ValueError, match="color='reward': must be one of turn, token_ratio"):
        show_trajectories([PLAIN], "reward")
    with pytest.raises(ValueError, match="trajectory 1 lacks advantage"):
        show_trajectories([MEASURED, PLAIN], "advantage")


def test_ladder_has_the_means_of_each_turn():
    fig, data = ladder(MEASURED)
    first, second = data.iloc[1], data.iloc[4]
    assert first["log_geometric"] == pytest.approx(0.0) and first["log_arithmetic"] == pytest.approx(
        math.log(1.25)
    )
    assert second["log_geometric"] == pytest.approx(math.log(1.1))
    assert second["log_arithmetic"] == pytest.approx(math.log(1.105))
    environment = data.iloc[[0, 3]][["token_ratio", "log_ratio", "log_geometric", "log_arithmetic"]]
    assert environment.isna().all(axis=None)
    (ax,) = fig.axes
    levels = sorted(
        line.get_ydata()[0] for line in ax.lines if len(line.get_xdata()) == 2 and line.get_lw() > 2
    )
    expected = [data.loc[t, f"log_{name}"] for t in (1, 4) for name in ("geometric", "arithmetic")]
    assert levels == pytest.approx(sorted(expected))
    spans = [line.get_xdata() for line in ax.lines if line.get_lw() > 2]
    assert all(x[0] > 0.5 and x[1] < 2.5 or x[0] > 3.5 and x[1] < 5.5 for x in spans)


def test_strips_list_the_turns_of_each_mask():
    split = MEASURED | {"turn_ids": [-1, 0, -1, -1, 1, 2], "turn_ratio": [0, 2.0, 0, 0, 1.0, 1.21]}
    fig, data = boundary_strips({"right": MEASURED, "split": split})
    assert data.values.tolist() == [
        ["right", 0, 1, 2, 1.0],
        ["right", 1, 4, 2, 1.1],
        ["split", 0, 1, 1, 2.0],
        ["split", 1, 4, 1, 1.0],
        ["split", 2, 5, 1, 1.21],
    ]
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["right", "split"]
