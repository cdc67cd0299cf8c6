"""`python -m medusa_ppo.loops.openrlhf`: OpenRLHF's own command with draft heads."""

from medusa_ppo.loops.openrlhf.driver import main

main()
