"""`python -m tests.sparse_ticks STORIES [MISTAKE | all]` plays stories and prints how many are broken."""

import sys

from tests.sparse_ticks.ranges import MISTAKES
from tests.sparse_ticks.story import play

stories, mistakes = int(sys.argv[1]), sys.argv[2:] or [""]
for mistake in MISTAKES if mistakes == ["all"] else mistakes:
    broken, steps = play(stories, mistake)
    first = f"; the first is story {broken[0][0]}: {broken[0][1]}" if broken else ""
    sys.stdout.write(f"{mistake or 'no mistake'}: {stories} stories, {steps} steps, {len(broken)} broken{first}\n")
