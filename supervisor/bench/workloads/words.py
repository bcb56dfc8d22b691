"""Texts of plain words: no text of any person, and none that a model has learned by heart."""

from __future__ import annotations

from random import Random
from typing import Final

_TEXT: Final = """
able about above across after again air almost along always animal answer apple area around
autumn back bag ball bank basket beach bear bell best bird blue board boat body book bottle box
bread bridge bright brother brown build butter call camp candle carry castle chair change circle
city clean clear clock cloud coat coffee cold colour corner cotton count country cover cross
cup dance dark deep desk dinner doctor door down draw dream dress drive dry early earth east
easy egg empty engine evening every family farm father field finger fire fish floor flower
follow forest forward friend fruit full garden gentle glass gold grass green ground group grow
guess half hand happy harbour heart heavy high hill history hold horse hour house hundred ice
idea iron island jacket journey kitchen ladder lake lamp language large later leaf learn left
letter light line lion list little long machine market meadow measure middle milk minute mirror
moment money moon morning mother mountain move music narrow near needle night noise north number
ocean office old open orange order other page paint paper parent path pencil people picture
piece place plain plant plate pocket point pond pool post pull push question quick quiet rain
reach read ready red rest rice ring river road rock roof room root round rule sail salt sand
school season second seed sentence seven shade shape sheep shelf ship shirt shoe short shoulder
silver simple sister six sky sleep slow small smoke snow soft soup south spoon spring square
stairs star station stone storm story street strong sugar summer sun table tall tea tent thing
thousand tiger time today tomorrow tower town train travel tree turn uncle under valley village
voice wagon walk wall warm wash watch water weather week west wheat wheel white wide wind window
winter wood wool word work world yard year yellow young
"""
WORDS: Final = tuple(_TEXT.split())


def text(rng: Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))
