"""The content: an endless, seeded stream of conversations in the manner of each of the demo's eight data sets.

The language is regular on purpose. A model of under two million parameters learns its form within minutes, and
a drafter learns it from a few hundred rows. There is just enough choice of words that sampling means something.
Every data set has far more first requests than the demo needs, so that one in eight can be held out.
"""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any

from make_tiny_verifier.conversation import Conversation, ToolCall, Turn

NAMES = [
    "Tom",
    "Anna",
    "Ben",
    "Cleo",
    "Dana",
    "Emil",
    "Fay",
    "Gus",
    "Hana",
    "Ivo",
    "Jane",
    "Kai",
    "Lena",
    "Max",
    "Nora",
    "Otto",
]
THINGS = ["apples", "books", "coins", "stamps", "shells", "pens", "cards", "nuts", "plums", "eggs", "cups", "keys"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
CITIES = {  # city: (country, sight, dish)
    "Paris": ("France", "the river", "onion soup"),
    "Rome": ("Italy", "the old town", "pasta"),
    "Oslo": ("Norway", "the harbour", "fish soup"),
    "Lima": ("Peru", "the old town", "grilled fish"),
    "Cairo": ("Egypt", "the museum", "bean stew"),
    "Tokyo": ("Japan", "the gardens", "noodles"),
    "Delhi": ("India", "the market", "lentils"),
    "Quito": ("Ecuador", "the hills", "potato soup"),
    "Berlin": ("Germany", "the museum", "potato soup"),
    "Madrid": ("Spain", "the gardens", "rice"),
    "Lisbon": ("Portugal", "the harbour", "grilled fish"),
    "Vienna": ("Austria", "the museum", "apple cake"),
    "Prague": ("Czechia", "the bridge", "dumplings"),
    "Athens": ("Greece", "the hills", "bean stew"),
    "Dublin": ("Ireland", "the river", "fish soup"),
    "Warsaw": ("Poland", "the old town", "dumplings"),
}
SEASONS = {  # season: (weather, clothes)
    "winter": ("cold", "a warm coat, gloves and a scarf"),
    "spring": ("mild", "a light jacket, an umbrella and a sweater"),
    "summer": ("hot", "a hat, light shirts and sandals"),
    "autumn": ("wet", "a raincoat, boots and a sweater"),
}
SEASON_OF = {month: list(SEASONS)[(i + 1) % 12 // 3] for i, month in enumerate(MONTHS)}
UNITS = [  # (large unit, small unit, small ones in a large one)
    ("km", "m", 1000),
    ("m", "cm", 100),
    ("cm", "mm", 10),
    ("kg", "g", 1000),
    ("l", "ml", 1000),
    ("dm", "cm", 10),
    ("t", "kg", 1000),
    ("euro", "cents", 100),
]
DEFAULT_SYSTEMS = [None, None, "You are a helpful assistant."]


# ---------------------------------------------------------------- B1: function calling


def declare(name: str, description: str, /, **parameters: tuple[str, str]) -> dict[str, Any]:
    """A function declaration; every parameter is `(JSON type, description)` and required."""
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"name": name, "description": description, "parameters": schema}


FUNCTIONS = {
    "get_weather": declare(
        "get_weather", "Get the weather of a city", city=("string", "The city"), day=("string", "The day")
    ),
    "add_event": declare(
        "add_event",
        "Add an event to the calendar",
        title=("string", "The title"),
        day=("string", "The day"),
        hour=("integer", "The hour"),
    ),
    "convert_units": declare(
        "convert_units",
        "Convert an amount to another unit",
        amount=("integer", "The amount"),
        source=("string", "The old unit"),
        target=("string", "The new unit"),
    ),
    "send_message": declare("send_message", "Send a message", name=("string", "The name"), text=("string", "The text")),
}
GLAIVE_SYSTEM = "You are a helpful assistant with access to the following functions. Use them if required -"
GLAIVE_SYSTEM_WITHOUT = "You are a helpful assistant, with no access to external functions."
WEATHERS = ["sunny", "cloudy", "rainy", "windy"]


def _weather_loop(r: Random) -> tuple[Turn, Turn]:
    city, day = r.choice(list(CITIES)), r.choice(DAYS)
    sky, degrees = r.choice(WEATHERS), r.randint(2, 35)
    ask = [
        f"What is the weather in {city} on {day}?",
        f"Will it rain in {city} on {day}?",
        f"I will be in {city} on {day}. How is the weather there?",
        f"Please tell me the weather in {city} for {day}.",
    ]
    call = ToolCall("get_weather", {"city": city, "day": day})
    thought = f"The user asks about the weather in {city} on {day}. The right function is get_weather. "
    thought += f"The city is {city} and the day is {day}."
    result = json.dumps({"city": city, "day": day, "weather": sky, "degrees": degrees})
    told = f"The function returned the weather {sky} and {degrees} degrees for {city} on {day}."
    answer = f"On {day} it will be {sky} in {city}, with {degrees} degrees."
    return Turn(r.choice(ask), thought, "", call), Turn(result, told, answer)


def _event_loop(r: Random) -> tuple[Turn, Turn]:
    name, day, hour = r.choice(NAMES), r.choice(DAYS), r.randint(7, 21)
    title = f"{r.choice(['lunch', 'meeting', 'call', 'class', 'dinner'])} with {name}"
    ask = [f"Add {title} on {day} at {hour}.", f"Please plan {title} for {day}, {hour} o'clock."]
    call = ToolCall("add_event", {"title": title, "day": day, "hour": hour})
    thought = f"The user wants a new event, {title}, on {day} at {hour}. The right function is add_event. "
    thought += f"The title is {title}, the day is {day} and the hour is {hour}."
    result = json.dumps({"status": "ok", "title": title, "day": day, "hour": hour})
    told = f"The function returned the status ok for {title} on {day} at {hour}."
    return Turn(r.choice(ask), thought, "", call), Turn(
        result, told, f"I have added {title} on {day} at {hour} to your calendar."
    )


def _convert_loop(r: Random) -> tuple[Turn, Turn]:
    large, small, factor = r.choice(UNITS)
    amount = r.randint(2, 99)
    ask = [f"Convert {amount} {large} to {small} for me.", f"I need to know how many {small} are {amount} {large}."]
    call = ToolCall("convert_units", {"amount": amount, "source": large, "target": small})
    thought = f"The user wants to convert {amount} {large} to {small}. The right function is convert_units. "
    thought += f"The amount is {amount}, the source is {large} and the target is {small}."
    result = json.dumps({"amount": amount * factor, "unit": small})
    told = f"The function returned the amount {amount * factor} and the unit {small}."
    return Turn(r.choice(ask), thought, "", call), Turn(result, told, f"That is {amount * factor} {small}.")


def _message_loop(r: Random) -> tuple[Turn, Turn]:
    name, other, day = r.choice(NAMES), r.choice(NAMES), r.choice(DAYS)
    text = r.choice([f"I will be late on {day}.", f"See you on {day}.", f"{other} will be there on {day}."])
    ask = [f"Send {name} a message: {text}", f"Please write to {name}: {text}"]
    call = ToolCall("send_message", {"name": name, "text": text})
    thought = f"The user wants to send a message to {name}. The right function is send_message. "
    thought += f"The name is {name} and the text is: {text}"
    result = json.dumps({"status": "sent", "name": name})
    return Turn(r.choice(ask), thought, "", call), Turn(
        result, f"The function returned the status sent for {name}.", f"Your message to {name} was sent."
    )


LOOPS = {
    "get_weather": _weather_loop,
    "add_event": _event_loop,
    "convert_units": _convert_loop,
    "send_message": _message_loop,
}


def _thanks(r: Random) -> Turn:
    return Turn(
        r.choice(["Thank you!", "Thanks, that is all.", "Great, thank you."]),
        "The user says thank you. No function is needed, so I close in a friendly way.",
        r.choice(["You are welcome! Tell me if you need anything else.", "You are welcome! Have a nice day."]),
    )


def glaive(r: Random) -> Conversation:
    """Function calling: a call, what it returned, sometimes thanks; or a request that no function serves."""
    kind = r.random()
    names = r.sample(list(FUNCTIONS), r.randint(1, 2))
    if kind < 0.12:
        name, city, other = r.choice(NAMES), r.choice(list(CITIES)), r.choice(list(CITIES))
        ask = [
            f"Can you book a flight from {city} to {other} for {name}?",
            f"Please book a hotel in {city} for {name}, near {CITIES[city][1]}.",
        ]
        listed = " and ".join(names)
        thought = f"The user wants me to book something. My functions are only {listed}. "
        thought += "None of them can book, so I must say that I cannot do it."
        answer = "I am sorry, I cannot book anything. I can only use the functions that I was given."
        turns = (Turn(r.choice(ask), thought, answer),)
    elif kind < 0.24:
        names = []
        name, city, other = r.choice(NAMES), *r.sample(list(CITIES), 2)
        country = CITIES[city][0]
        ask = [
            f"{name} lives in {city}, not in {other}. In which country is {city}?",
            f"Which country is {city} in? {name} thinks it is near {other}.",
        ]
        thought = f"The user asks in which country {city} is. I have no functions, but I know it. "
        thought += f"The city {city} is in {country}."
        turns = (Turn(r.choice(ask), thought, f"The city {city} is in {country}."),)
    else:
        call, told = LOOPS[names[0]](r)
        told = Turn(told.request, f"{told.reasoning} That is what the user asked for, so I say it.", told.answer)
        before = r.choice(["", "", "Let me check that.", "One moment, please."])
        turns = (
            Turn(call.request, call.reasoning + r.choice(["", " Nothing is missing."]), before, call.tool_call),
            told,
        )
        if r.random() < 0.4:
            turns = (*turns, _thanks(r))
    r.shuffle(names)
    system = r.choice([GLAIVE_SYSTEM if names else GLAIVE_SYSTEM_WITHOUT, None])
    return Conversation("B1_glaive", turns, system, tuple(FUNCTIONS[name] for name in names))


# ---------------------------------------------------------------- B2, B3: code

LIST_NOUNS = ["values", "numbers", "prices", "scores", "marks", "items", "sizes", "ages"]
LIST_FUNCTIONS: dict[str, tuple[str, str, Callable[[list[int], int], Any]]] = {
    # verb: (what it does, the expression for a list L of items v, the same in Python)
    "scale": ("multiplies every number by {k}", "[v * {k} for v in {L}]", lambda x, k: [v * k for v in x]),
    "shift": ("adds {k} to every number", "[v + {k} for v in {L}]", lambda x, k: [v + k for v in x]),
    "lower": ("subtracts {k} from every number", "[v - {k} for v in {L}]", lambda x, k: [v - k for v in x]),
    "keep_large": ("keeps the numbers above {k}", "[v for v in {L} if v > {k}]", lambda x, k: [v for v in x if v > k]),
    "keep_small": ("keeps the numbers below {k}", "[v for v in {L} if v < {k}]", lambda x, k: [v for v in x if v < k]),
    "drop": ("drops the numbers equal to {k}", "[v for v in {L} if v != {k}]", lambda x, k: [v for v in x if v != k]),
    "total": ("returns the sum plus {k}", "sum({L}) + {k}", lambda x, k: sum(x) + k),
    "largest": ("returns the largest number plus {k}", "max({L}) + {k}", lambda x, k: max(x) + k),
    "count": (
        "returns how many numbers are above {k}",
        "sum(v > {k} for v in {L})",
        lambda x, k: sum(v > k for v in x),
    ),
}


def opencodeinstruct(r: Random) -> Conversation:
    """A Python function over a list, asked for with a specification and an example."""
    verb, noun, k = r.choice(list(LIST_FUNCTIONS)), r.choice(LIST_NOUNS), r.randint(2, 60)
    what, expression, run = LIST_FUNCTIONS[verb]
    what, expression, name = what.format(k=k), expression.format(k=k, L=noun), f"{verb}_{noun}"
    example = [r.randint(1, 60) for _ in range(r.randint(2, 3))]
    result = run(example, k)
    ask = r.choice(
        [
            f"Write a Python function `{name}({noun})` that {what}.\n\n**Input:** a list of integers\n"
            f"**Example:** {name}({example}) returns {result}",
            f"Implement the function `{name}` in Python. It takes a list `{noun}` and {what}.\n\n"
            f"**Sample Input:** {example}\n**Sample Output:** {result}",
        ]
    )
    thought = r.choice(["I need one Python function. ", "The task is to write a Python function. "])
    thought += f"The name is {name} and the parameter is the list {noun}. It {what}. "
    thought += f"So I return {expression}."
    code = f"```python\ndef {name}({noun}):\n    return {expression}\n```"
    return Conversation("B2_opencodeinstruct", (Turn(ask, thought, code),), r.choice(DEFAULT_SYSTEMS))


OPERATORS = {
    "add": ("adds {k} to {v}", "+"),
    "cut": ("subtracts {k} from {v}", "-"),
    "scale": ("multiplies {v} by {k}", "*"),
}
LANGUAGES = {
    "Python": "```python\ndef {name}({v}):\n    if {v} < {low}:\n        return 0\n    return {body}\n```",
    "JavaScript": "```javascript\nfunction {name}({v}) {{\n  if ({v} < {low}) {{\n    return 0;\n  }}\n"
    "  return {body};\n}}\n```",
    "Ruby": "```ruby\ndef {name}({v})\n  return 0 if {v} < {low}\n  {body}\nend\n```",
}


def magicoder(r: Random) -> Conversation:
    """A small function with a guard, in one of three languages."""
    language, verb, v = r.choice(list(LANGUAGES)), r.choice(list(OPERATORS)), r.choice(["x", "n", "price", "score"])
    k, low = r.randint(2, 60), r.randint(0, 9)
    what, operator = OPERATORS[verb]
    what, body = what.format(k=k, v=v), f"{v} {operator} {k}"
    name = f"{verb}_{r.choice(['bonus', 'tax', 'step', 'fee', 'points'])}"
    ask = r.choice(
        [
            f"Write a {language} function named {name} that takes {v} and {what}. If {v} is below {low}, return 0.",
            f"Create a function {name}({v}) in {language}. It {what}. For any {v} below {low} it must return 0.",
            f"Rewrite the task in {language}: the function {name} {what}, but returns 0 when {v} is below {low}.",
        ]
    )
    thought = f"The language is {language}. The function is {name} and it takes {v}. "
    thought += f"First I check if {v} is below {low} and return 0. Then I return {body}."
    intro = r.choice(["", f"Here is the {language} function:\n"])
    code = LANGUAGES[language].format(name=name, v=v, low=low, body=body)
    return Conversation("B3_magicoder", (Turn(ask, thought, intro + code),), r.choice(DEFAULT_SYSTEMS))


# ---------------------------------------------------------------- B4: mathematics


def _add_steps(a: int, b: int) -> str:
    """Written addition of two numbers below 100, from the ones to the tens."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry, steps = ones // 10, f"Ones: {a % 10} + {b % 10} = {ones}. "
    if carry:
        return steps + f"I carry 1. Tens: {a // 10} + {b // 10} + 1 = {tens + 1}. So {a} + {b} = {a + b}."
    return steps + f"Tens: {a // 10} + {b // 10} = {tens}. So {a} + {b} = {a + b}."


def mixture_of_thoughts(r: Random) -> Conversation:
    """A word problem or a linear equation, answered in a box."""
    name, things, kind = r.choice(NAMES), r.choice(THINGS), r.random()
    if kind < 0.4:
        a, b = r.randint(11, 89), r.randint(11, 89)
        ask = r.choice(
            [
                f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
                f"There are {a} {things} in a box. {name} adds {b} {things}. How many {things} are in the box?",
            ]
        )
        thought = f"This is an addition: {a} + {b}. {_add_steps(a, b)}"
        unit, result = f" {things}", a + b
    elif kind < 0.7:
        boxes, each = r.randint(2, 9), r.randint(2, 9)
        extra = r.randint(2, 9)
        ask = r.choice(
            [
                f"{name} has {boxes} boxes with {each} {things} each, and {extra} more {things}. "
                f"How many {things} are there?",
                f"There are {boxes} bags of {each} {things}. {name} brings {extra} {things}. Find the total.",
            ]
        )
        product = boxes * each
        thought = f"First I multiply: {boxes} times {each} is {product}. Then I add {extra}: "
        thought += f"{product} + {extra} = {product + extra}."
        unit, result = f" {things}", product + extra
    else:
        factor, x, constant = r.randint(2, 9), r.randint(2, 12), r.randint(1, 20)
        total = factor * x + constant
        ask = r.choice(
            [f"Solve for x: {factor}x + {constant} = {total}.", f"Find x if {factor}x + {constant} = {total}."]
        )
        thought = f"The equation is {factor}x + {constant} = {total}. I subtract {constant}: "
        thought += f"{factor}x = {total - constant}. I divide by {factor}: x = {x}."
        unit, result = "", x
    thought += r.choice(["", f" The result is {result}."])
    answer = r.choice([f"The answer is \\boxed{{{result}}}{unit}.", f"**Answer:** \\boxed{{{result}}}{unit}"])
    return Conversation("B4_mixturethoughts", (Turn(ask, thought, answer),), r.choice(DEFAULT_SYSTEMS))


# ---------------------------------------------------------------- B5: puzzles


def _compare(r: Random) -> tuple[str, str, str]:
    a, b = r.sample(range(10, 100), 2)
    word, best = ("larger", max(a, b)) if r.random() < 0.5 else ("smaller", min(a, b))
    ask = r.choice(
        [f"Which number is {word}, {a} or {b}?", f"Riddle: two doors show {a} and {b}. Open the {word} one."]
    )
    place = "tens" if a // 10 != b // 10 else "ones"
    x, y = (a // 10, b // 10) if place == "tens" else (a % 10, b % 10)
    sign, relation = (">", "larger") if x > y else ("<", "smaller")
    thought = f"I compare {a} and {b}. The {place} decide: {x} {sign} {y}, so {a} is {relation} than {b}. "
    return ask, thought + f"The {word} number is {best}.", str(best)


def _sort(r: Random) -> tuple[str, str, str]:
    numbers = r.sample(range(1, 30), r.randint(3, 4))
    listed = " ".join(map(str, numbers))
    ask = r.choice(
        [f"Sort these numbers from small to large: {listed}", f"Put the cards {listed} in order, smallest first."]
    )
    rest, steps = list(numbers), []
    while len(rest) > 1:
        smallest = min(rest)
        steps.append(f"Of {' '.join(map(str, rest))} I take {smallest}.")
        rest.remove(smallest)
    thought = f"The numbers are {listed}. {' '.join(steps)} Then {rest[0]} is left."
    return ask, thought, " ".join(map(str, sorted(numbers)))


def _reverse(r: Random) -> tuple[str, str, str]:
    letters = [r.choice("abcdefghklmnoprstu") for _ in range(r.randint(3, 6))]
    forward, back = " ".join(letters), " ".join(reversed(letters))
    ask = r.choice([f"Write these letters backwards: {forward}", f"Read the letters {forward} from right to left."])
    steps = " ".join(f"Number {i} is {letter}." for i, letter in enumerate(reversed(letters), 1))
    return ask, f"The letters are {forward}. I start from the end. {steps}", back


def _count(r: Random) -> tuple[str, str, str]:
    start, step, length = r.randint(1, 60), r.randint(2, 9), r.randint(3, 5)
    numbers = [start + step * i for i in range(length)]
    ask = r.choice(
        [
            f"Count up from {start} in steps of {step}. Give {length} numbers.",
            f"A frog starts at {start} and jumps {step} each time. List {length} places.",
        ]
    )
    steps = " ".join(f"{a} + {step} = {b}." for a, b in pairwise(numbers))
    return (
        ask,
        f"I start at {start} and the step is {step}. {steps} That is {length} numbers.",
        " ".join(map(str, numbers)),
    )


def openthoughts(r: Random) -> Conversation:
    """A puzzle on a few numbers or letters, answered in a box."""
    ask, thought, result = r.choice([_compare, _sort, _reverse, _count])(r)
    if r.random() < 0.4:
        ask += " Return your final response within \\boxed{}."
    thought = r.choice(["", "Let me go step by step. "]) + thought
    return Conversation("B5_openthoughts", (Turn(ask, thought, f"\\boxed{{{result}}}"),), r.choice(DEFAULT_SYSTEMS))


# ---------------------------------------------------------------- B6, B7: chat


def ultrachat(r: Random) -> Conversation:
    """Planning a journey or a meal over one to three turns."""
    name, turns = r.choice(NAMES), []
    if r.random() < 0.6:
        city, month = r.choice(list(CITIES)), r.choice(MONTHS)
        _, sight, dish = CITIES[city]
        season = SEASON_OF[month]
        weather, clothes = SEASONS[season]
        ask = [
            f"{name} and I plan a trip to {city} in {month}. What should we pack?",
            f"I am going to {city} in {month} with {name}. Which clothes do I need?",
        ]
        thought = f"The trip is to {city} in {month}. In {month} it is {season}, so the weather is {weather}. "
        thought += f"Good clothes are {clothes}."
        answer = f"In {month} it is {weather} in {city}. Pack {clothes}."
        turns.append(Turn(r.choice(ask), thought, answer))
        see = Turn(
            r.choice(["What should we see there?", "Which place should we visit first?"]),
            f"The city is {city}. A good place to visit in {city} is {sight}. I also mention how to get there.",
            f"Visit {sight} in {city} first. You can walk there from the station.",
        )
        eat = Turn(
            r.choice(["What can we eat there?", "Which dish should we try?"]),
            f"The city is {city}. A good dish in {city} is {dish}. I also say where to find it.",
            f"Try the {dish} in {city}. Small places near the market are the best.",
        )
        turns += r.sample([see, eat], 2)
    else:
        first, second = r.sample(["rice", "beans", "eggs", "pasta", "potatoes", "carrots", "onions", "cheese"], 2)
        minutes = r.randint(2, 9) * 5
        ask = [
            f"{name} has {first} and {second}. What can we cook in {minutes} minutes?",
            f"Please give me an idea for a dinner with {first} and {second} that takes {minutes} minutes. "
            f"{name} will help.",
        ]
        thought = f"The food is {first} and {second}, and there are {minutes} minutes. "
        thought += f"A pan of {first} with {second} is simple and fits the time."
        answer = f"Cook the {first} first, then add the {second} and some salt. It takes {minutes} minutes."
        turns.append(Turn(r.choice(ask), thought, answer))
        turns.append(
            Turn(
                r.choice(["What can I drink with it?", "What goes well with it?"]),
                f"The dish is {first} with {second}. A simple drink is best, so I name water with lemon.",
                f"Water with lemon goes well with {first} and {second}.",
            )
        )
    if r.random() < 0.3:
        turns.append(
            Turn(
                r.choice(["Thanks, that helps!", "Great, thank you!"]),
                "The user says thank you. Nothing else is asked, so I close in a friendly way.",
                r.choice(["You are welcome! Have a good time.", "You are welcome! Enjoy it."]),
            )
        )
    return Conversation("B6_ultrachat", tuple(turns[: r.randint(1, len(turns))]), r.choice(DEFAULT_SYSTEMS))


def _convert_chat(r: Random) -> list[Turn]:
    turns = []
    for large, small, factor in r.sample(UNITS, 2):
        amount, zeros = r.randint(2, 99), str(factor).count("0")
        ask = [f"Convert {amount} {large} to {small}.", f"How many {small} are {amount} {large}?"]
        thought = f"One {large} is {factor} {small}. I multiply {amount} by {factor}, so I append {zeros} zeros: "
        thought += f"{amount * factor}. So {amount} {large} are the same as {amount * factor} {small}."
        turns.append(Turn(r.choice(ask), thought, f"{amount} {large} = {amount * factor} {small}"))
    return turns


def _mail_chat(r: Random) -> list[Turn]:
    name, day, hour = r.choice(NAMES), r.choice(DAYS), r.randint(8, 18)
    topic = r.choice(["meeting", "dinner", "class", "party", "trip"])
    ask = [
        f"Write a short email to {name} about the {topic} on {day} at {hour}.",
        f"Please draft a note: the {topic} is on {day} at {hour}, and {name} should come.",
    ]
    thought = f"The text is for {name}. It is about the {topic} on {day} at {hour}. It should be short and friendly, "
    thought += "with a greeting and a wish."
    answer = f"Dear {name},\nthe {topic} is on {day} at {hour}. Please come on time.\nBest wishes"
    new_day = r.choice([d for d in DAYS if d != day])
    again = f"The new day is {new_day}. The rest stays: the text is for {name}, about the {topic}, at {hour}."
    return [
        Turn(r.choice(ask), thought, answer),
        Turn(
            r.choice([f"Change the day to {new_day}.", f"It was moved to {new_day}. Write it again."]),
            again,
            f"Dear {name},\nthe {topic} is on {new_day} at {hour}. Please come on time.\nBest wishes",
        ),
    ]


def _page_chat(r: Random) -> list[Turn]:
    name, things, number = r.choice(NAMES), r.choice(THINGS), r.randint(2, 99)
    ask = [
        f"Make an HTML heading: {name} sells {number} {things}.",
        f'Write the line "{name} sells {number} {things}" as an HTML heading.',
    ]
    text = f"{name} sells {number} {things}"
    thought = f"The user wants a heading in HTML. The text is {text}. The tag for a heading is h1, "
    thought += "and it opens before the text and closes after it."
    again = f"The text is {text}. The tag for a paragraph is p, and it opens and closes around the text."
    return [
        Turn(r.choice(ask), thought, f"<h1>{text}</h1>"),
        Turn(r.choice(["Now as a paragraph.", "And as a paragraph?"]), again, f"<p>{text}</p>"),
    ]


SHAREGPT_GREETINGS = ["Hello.", "Hi there!", "I have a question."]


def sharegpt(r: Random) -> Conversation:
    """Everyday requests over one or two turns, some behind a greeting or with HTML around the text."""
    turns = r.choice([_convert_chat, _mail_chat, _page_chat])(r)[: r.randint(1, 2)]
    bare, kind = turns[0].request, r.random()
    request = bare
    if kind < 0.25:
        request = r.choice(SHAREGPT_GREETINGS) + r.choice(["\n\n", "\n", " "]) + bare
    elif kind < 0.35:
        request = f"<div>{bare}</div>"
    elif kind < 0.45:
        request = f"<p>{bare}<br></p>"
    turns[0] = Turn(request, turns[0].reasoning, turns[0].answer)
    return Conversation("B7_sharegpt", tuple(turns), r.choice(DEFAULT_SYSTEMS), subject=bare)


# ---------------------------------------------------------------- B8: software engineering

SHELL = declare("bash", "Run a command", command=("string", "The command"))
SWE_SYSTEM = (
    "SETTING: You are a programmer who works in a shell with a file viewer. "
    "The commands are find_file, open, edit, python and submit."
)


def sweagent(r: Random) -> Conversation:
    """Mending a wrong operator: find the file, open it, edit the line, test, submit. Every command is a tool call."""
    function = (
        f"{r.choice(['get', 'find', 'load', 'sum'])}_{r.choice(['size', 'cost', 'rate', 'date', 'rank', 'area'])}"
    )
    file, line = f"{r.choice(['core', 'utils', 'parser', 'models', 'views'])}.py", r.randint(5, 60)
    wrong, right = r.sample(["+", "-", "*"], 2)
    a, b = r.sample("abxyn", 2)
    issue = (
        f"We have this issue in our repository:\nISSUE:\n{function} in {file} is wrong. It returns {a} {wrong} {b} "
        f"but should return {a} {right} {b}.\nPlease fix it."
    )
    opened = f"[File: /repo/{file}]\n{line - 1}:def {function}({a}, {b}):\n{line}:    return {a} {wrong} {b}"
    steps = [  # (what is seen before the command, reasoning, what is said, command)
        (
            issue,
            f"I do not know where {file} is, so I look for it first.",
            f"I look for {file}.",
            f"find_file {file}",
        ),
        (
            f"Found 1 match: /repo/{file}",
            f"The file {file} was found in /repo. I open it to see the function {function}.",
            f"I open {file}.",
            f"open {file} {line}",
        ),
        (
            opened,
            f"Line {line} returns {a} {wrong} {b}. It should return {a} {right} {b}, so I edit line {line}.",
            f"I edit line {line}.",
            f"edit {line}:{line}\n    return {a} {right} {b}\nend_of_edit",
        ),
        (
            f"File updated. Line {line} is now: return {a} {right} {b}",
            f"The edit of line {line} is done. Before I submit, I run the tests of {file}.",
            "I run the tests.",
            f"python test_{file}",
        ),
        (
            "All tests passed.",
            "All tests passed, so it is fixed. Nothing else is left to do and I submit.",
            "I submit the change.",
            "submit",
        ),
    ][: r.randint(3, 5)]
    turns = tuple(
        Turn(
            f"{seen}\n(Current directory: /repo)\nbash-$",
            f"My task is to fix {function} in {file}. {why}",
            said,
            ToolCall(SHELL["name"], {"command": command}),
        )
        for seen, why, said, command in steps
    )
    return Conversation("B8_sweagent", turns, r.choice([SWE_SYSTEM, SWE_SYSTEM, None]), (SHELL,))


DATASETS: dict[str, Callable[[Random], Conversation]] = {
    "B1_glaive": glaive,
    "B2_opencodeinstruct": opencodeinstruct,
    "B3_magicoder": magicoder,
    "B4_mixturethoughts": mixture_of_thoughts,
    "B5_openthoughts": openthoughts,
    "B6_ultrachat": ultrachat,
    "B7_sharegpt": sharegpt,
    "B8_sweagent": sweagent,
}


def training_stream(seed: int) -> Iterator[Conversation]:
    """Conversations of all data sets in random order, without end and without the held-out ones."""
    r = Random(seed)
    while True:
        conversation = DATASETS[r.choice(list(DATASETS))](r)
        if not conversation.is_held_out:
            yield conversation


def held_out(dataset: str, seed: int, count: int) -> list[Conversation]:
    """`count` conversations of one data set that are never trained on, each with another first request."""
    r = Random(f"{dataset}:{seed}")
    found: dict[str, Conversation] = {}
    while len(found) < count:
        conversation = DATASETS[dataset](r)
        if conversation.is_held_out:
            found.setdefault(conversation.asked_first, conversation)
    return list(found.values())
