"""What a launch, or a cell of live workers, shows of itself while it runs.

facts       the facts, by rank: no drawing
rank_times  where ranks' time goes, compared: who waits for whom
time_left   what is left of a training
advice      what is wrong, and what to do
words       from the facts to text
curves      from the facts to charts
html_parts  pieces of HTML, for the panel, the summary and reports
live_html   from all of these to the panel
run_notes   which runs go on, for `nbaccel status`
display     the panel in its place: a cell's output that is changed, or lines in a terminal
"""
