"""Training examples for the tests of training."""

from rbd_train.records import Case, Definition, Example, Trace, View


def example(number: int, verdict: bool) -> Example:
    case = Case(
        id=f"c{number}",
        definitions=(Definition(name="Verbosity bias", text="preferring the longer output."),),
        question=f"What is {number} + {number}?",
        views=(View(options=(str(2 * number), f"It is {number} more, {'so ' * (number % 7)}{2 * number}."), choice=1),),
        judge="judge",
    )
    trace = Trace(
        case_id=case.id, author="test", thinking=f"{number} + {number} = {2 * number}.", verdict=verdict, reply=""
    )
    bias = "verbosity" if number % 3 else "position"
    return Example(case=case, bias=bias, group=f"g{number}", label=verdict, trace=trace)
