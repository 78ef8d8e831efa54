"""What a launch, or a cell of live workers, shows of itself while it runs.

facts       the facts, by rank: no drawing
rank_times  where ranks' time goes, compared, and as bars: who waits for whom
time_left   what is left of a training
words       from the facts to text
curves      from the facts to charts
live_html   from all of these to HTML
run_panel   the panel as widgets, with its buttons
display     the panel in its place: a cell's output that is changed, or lines in a terminal
following   keeps the panel up to date while workers are listened to
"""
