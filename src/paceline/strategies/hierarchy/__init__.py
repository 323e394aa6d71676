"""Host sums, or parameter servers, group by group."""
