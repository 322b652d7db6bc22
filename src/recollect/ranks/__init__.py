"""Make processes that train one model together record the same steps and run them under the same plan."""
