"""The names and words that templates draw from."""

STEMS = """agenda album answers archive atlas basket batch board budget cargo catalog chapter chart contacts
copy course customers dates diary draft entries essay events facts field figures final frames guests guide
history hotels index input inventory items journal labels letter library list lyrics manual market members
memo menu minutes names notes novel orders outline pages parts plan plants poem points prices profile project
quotes readme recipe records report results review routes sample scores script season sheet stock story
summary survey table tasks teams test ticket timer todo tools tour trips values visits votes words""".split()
FOLDERS = """assets attic backup barn bench bin books cabinet camp canteen cellar class clients club corner
court data deck depot desk dock docs drafts drawer exhibit factory farm fleet forge gallery garage garden
guild hall hobby house hut inbox kiosk kitchen lab lodge loft media mill museum music nest office old outbox
pantry photos pool porch port public quarry room school shared shed shelf shop source stall station store
studio temp tower trunk vault web wharf work yard""".split()
WORDS = """amber anchor apple arrow autumn bamboo barrel basil beacon bell birch blanket blossom boat bottle
branch bread bridge bronze bucket butter button cabin candle canyon carbon carpet castle cedar cherry circle
clay cliff clover coast cobalt coral cotton crystal desert dolphin dragon eagle ember engine falcon feather
fern flint forest fossil fountain galaxy garlic ginger glacier granite harbor hazel helmet honey island ivory
jacket jasmine jungle kettle lagoon lantern lemon linen lotus magnet maple marble meadow melon mirror mountain
needle nickel oasis olive onyx orchid oyster paper pebble pepper piano pillow planet plum pocket prairie
quartz rabbit rain ribbon river rocket saddle saffron sail sand satin shadow silver spruce stone sugar sunset
temple thunder tiger timber tulip tunnel valley velvet violet walnut water willow window winter""".split()
PEOPLE = """Ada Alma Anna Arthur Bela Carl Clara Dora Edgar Elena Emil Erik Fatima Felix Flora Georg Greta
Hana Hugo Ida Irma Ivan Jonas Julia Karim Kira Lars Laura Lena Leo Lucia Marta Max Mila Nadia Nina Noah Olga
Omar Oscar Paula Pedro Rosa Ruben Samir Sara Selma Sofia Theo Tilda Vera Victor Wanda Yara Zoe""".split()
SURNAMES = """Adler Bauer Berg Carter Castro Conti Dale Diaz Duval Evans Falk Ferrer Fischer Flores Frost
Gallo Grant Haas Hansen Ito Jansen Keller Kovacs Lang Larsen Lopez Marino Meyer Moreau Novak Okafor Olsen
Petrov Quinn Rossi Roth Sato Silva Stone Tanaka Vargas Weber Wolf Young Zeman""".split()
CITIES = """Athens Basel Bergen Berlin Bilbao Boston Cairo Cork Dakar Delhi Denver Dublin Geneva Ghent Hanoi
Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Malmo Milan Nairobi Naples Oslo Paris Porto Prague Quito Riga
Rome Seoul Sofia Split Tokyo Turin Utrecht Vienna Warsaw Zagreb Zurich""".split()
SERVICES = """auth billing cache cart catalog chat email export gateway images import ledger login mailer
metrics orders payments profile queue report search session stats storage sync upload worker""".split()
EVENTS = """cache miss;connection closed;connection opened;disk almost full;file not found;job finished;job started;
key expired;limit reached;lock released;message sent;no such user;request accepted;request refused;retry later;
token renewed;value too large;worker stopped""".replace("\n", "").split(";")
LIBRARIES = """attrs babel black boltons celery click cython dask django fabric falcon flask furl gevent httpx
invoke jinja2 keras loguru lxml mypy nltk nose numba numpy pandas peewee pillow polars psutil pydantic
pygments pytest redis rich scipy sphinx sympy tablib toolz tornado tqdm typer wheel xarray yarl""".split()
SCRIPTS = """backup check cleanup collect compact deploy export fetch fix import index invoice mail merge
notify ping prune publish refresh remind render rename report rotate scan send stats sync test update upload
verify watch""".split()
