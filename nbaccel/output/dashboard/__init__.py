"""What a launch, or a cell of live workers, shows of itself while it runs.

board       the facts, by rank: no drawing
rank_times  where ranks' time goes, compared: who waits for whom
drawing     from the facts to text, and the words that all forms share
curves      from the facts to charts
css_bars    from times to bars
panel_html  from all of these to HTML: the panel while a call runs, and the summary that stays
run_panel   the panel as widgets, with its buttons
display     the panel in its place: a cell's output that is changed, or lines in a terminal
following   keeps the panel up to date while workers are listened to
"""
