#!/bin/sh
# Records the session of the shell that the README shows: a store made by real requests, then keys
# typed in tmux. Needs kvdb on the PATH, tmux and `kvdb models pull smollm2-135m`.
set -eu
KVDB_STORE=${KVDB_STORE:-$(mktemp -d)/store}
export KVDB_STORE
bakery="You are the assistant of a small bakery in Lyon. You answer in one short sentence and you are
always polite. The bakery opens at seven in the morning and closes at seven in the evening, and it is
closed on Mondays. It sells bread, croissants, brioche, tarts and coffee. A baguette costs one euro
and twenty cents, a croissant one euro and thirty cents, a brioche six euros. Everything is baked on
the same day in the oven behind the shop. Orders for cakes must be made two days before. If you do
not know the answer, say that you will ask Marie."

if [ ! -d "$KVDB_STORE" ]; then
    kvdb generate --system-prompt "$bakery" --prompt "When do you open?" --max-tokens 12
    kvdb generate --system-prompt "$bakery" --prompt "When do you open?" --max-tokens 12
    kvdb generate --system-prompt "$bakery" --prompt "What does a brioche cost?" --max-tokens 12
    kvdb generate --system-prompt "It is 17:04. $bakery" --prompt "Do you sell tea?" --max-tokens 12
    kvdb generate --system-prompt "$bakery" --prompt "Are dogs welcome?" --max-tokens 12
fi

screen() { tmux -L kvdb-record "$@"; }
type_line() {
    screen send-keys -l "$(printf %s "$1" | sed 's/;$/\\;/')" # tmux ends a command at a last ;
    sleep 1
    screen send-keys Enter
    sleep 3
}
screen new-session -d -x 92 -y 46 "kvdb shell"
trap 'screen kill-server' EXIT
sleep 5
screen send-keys -l "SELECT skip, count(*) AS requests, sum(rest"
sleep 2
screen capture-pane -p | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}'
echo
echo "[the word is completed, and the statement ended on another line]"
screen send-keys Tab
sleep 1
type_line ") AS restored"
type_line "FROM requests GROUP BY skip ORDER BY restored DESC;"
type_line ".miss"
type_line ".miss 4"
type_line ".savings"
screen capture-pane -p | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}'
