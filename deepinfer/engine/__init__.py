"""The host side: requests, pools, the scheduler, step plans and the loop that joins them to a runner."""
