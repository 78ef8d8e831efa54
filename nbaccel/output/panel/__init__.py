"""What a launch, or a cell of live workers, shows of itself while it runs.

facts       the facts, by rank: no drawing; what is left of a training
rank_times  where ranks' time goes, compared: who waits for whom
words       from the facts to text; what is wrong, and what to do
curves      from the facts to charts
live_html   from all of these to the panel, and pieces of HTML for summaries and reports
run_notes   which runs go on, for `nbaccel status`
display     the panel in its place: a cell's output that is changed, or lines in a terminal
"""
