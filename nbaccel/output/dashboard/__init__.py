"""What a launch, or a cell of live workers, shows of itself while it runs.

board      the facts, by rank: no drawing
drawing    from the facts to HTML and text
display    the dashboard in its place: a cell's output that is changed, or lines in a terminal
following  keeps a dashboard up to date while workers are listened to
"""
