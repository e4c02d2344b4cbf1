"""The commands other than views. `arguments.COMMANDS` names the function of each."""
