//! Compares the executions of a storm with the answers that the clients got.

use std::collections::{BTreeMap, HashMap};

use super::{Sent, Told};
use crate::ledger::{End, Line};
use crate::words::Key;

/// Execution of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Execution {
    /// End of the execution.
    pub end: End,
    /// Meaning of the request.
    pub meaning: String,
    /// True if the client cannot have noticed the execution: the process sends the head of a stream before it
    /// computes, and died before the first byte. Then the gateway may send the request again, so this
    /// execution does not count.
    pub unseen: bool,
    /// Number of ledger lines before the execution began, and before the process's last line, after which it
    /// may have died.
    pub between: (usize, usize),
}

/// Returns the executions by the name of the request.
pub fn executions(lines: &[Line]) -> BTreeMap<String, Vec<Execution>> {
    let mut ends: HashMap<(i32, u64), End> = HashMap::new();
    let mut heads = std::collections::HashSet::new();
    let last: HashMap<i32, usize> = lines.iter().map(|line| line.pid).zip(0..).collect();
    for line in lines {
        let key = (line.pid, line.ordinal);
        match line.event.as_str() {
            "begun" => {}
            "head" => drop(heads.insert(key)),
            "finished" => drop(ends.insert(key, End::Finished)),
            _ => drop(ends.insert(key, End::Cancelled)),
        }
    }
    let mut all: BTreeMap<String, Vec<Execution>> = BTreeMap::new();
    // The gateway sends names with `?` itself, to learn how llama-server understands a request.
    let asked = |(_, line): &(usize, &Line)| line.event == "begun" && !line.id.ends_with('?');
    for (index, line) in lines.iter().enumerate().filter(asked) {
        let key = (line.pid, line.ordinal);
        let end = ends.get(&key).copied().unwrap_or(End::Open);
        let unseen = end == End::Open && line.stream && line.head_first && !heads.contains(&key);
        let between = (index, last.get(&line.pid).copied().unwrap_or(index));
        let one = Execution { end, meaning: line.meaning.clone(), unseen, between };
        all.entry(line.id.clone()).or_default().push(one);
    }
    all
}

/// Compares one client's result with the executions. If the model `continues`, one more execution may have
/// died with its process.
///
/// # Errors
/// The result contradicts the executions.
pub fn audit(sent: &Sent, executed: &[Execution], continues: bool) -> Result<(), String> {
    let told = sent.told.as_ref().map_err(|why| format!("{why:?}"))?;
    let mut seen: Vec<&Execution> = executed.iter().filter(|one| !one.unseen).collect();
    // The process of the first execution died or was stopped, perhaps after finishing it, before the second
    // began.
    if let [first, second, ..] = seen[..]
        && continues
        && (first.end != End::Finished || first.between.1 < second.between.0)
    {
        seen.remove(0);
    }
    let count = seen.len();
    let finished = seen.iter().filter(|one| one.end == End::Finished).count();
    let key = Key::of(&sent.request);
    if let Some(other) = executed.iter().find(|one| one.meaning != key.long()) {
        return Err(format!("something else was executed: {other:?}"));
    }
    if let Told::Whole(answer) = told {
        let wanted = key.text(sent.request["max_tokens"].as_u64().unwrap_or(0));
        if answer.text != wanted || answer.finish.as_deref() != Some("length") {
            return Err(format!("{:?} ({:?}) instead of {wanted:?}", answer.text, answer.finish));
        }
    }
    match told {
        Told::Whole(_) if count == 1 && finished == 1 => Ok(()),
        Told::Refused { nothing_ran: true, .. } if count == 0 => Ok(()),
        Told::Refused { nothing_ran: false, .. } | Told::Cut | Told::Left if count <= 1 => Ok(()),
        other => Err(format!("told {other:?}, executed {executed:?}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Answer;
    use crate::warden::chat;

    fn line(event: &str, pid: i32, stream: bool) -> Line {
        let meaning = Key::of(&chat("r", "m", "hi", 2, true)).long();
        serde_json::from_value(json!({
            "event": event, "id": "r", "pid": pid, "ordinal": 1, "at_ms": 1, "stream": stream, "meaning": meaning,
            "head_first": true,
        }))
        .unwrap_or_else(|_| unreachable!("a line"))
    }

    fn verdict(told: Told, lines: &[Line]) -> bool {
        judged(told, lines, false)
    }

    fn judged(told: Told, lines: &[Line], continues: bool) -> bool {
        let request = chat("r", "m", "hi", 2, true);
        let sent = Sent { id: "r".to_owned(), request, told: Ok(told) };
        let executed = executions(lines);
        audit(&sent, executed.get("r").map_or(&[][..], Vec::as_slice), continues).is_ok()
    }

    fn whole() -> Told {
        let key = Key::of(&chat("r", "m", "hi", 2, true));
        let finish = Some("length".to_owned());
        Told::Whole(Box::new(Answer { text: key.text(2), finish, done: true, ..Answer::default() }))
    }

    #[test]
    fn an_answer_needs_one_finished_execution_and_no_other_that_anybody_could_have_known_of() {
        let good = [line("begun", 1, true), line("head", 1, true), line("finished", 1, true)];
        assert!(verdict(whole(), &good));
        assert!(!verdict(whole(), &[]));
        assert!(!verdict(whole(), &good[..2]));
        let twice = [&good[..], &[line("begun", 2, true), line("head", 2, true)]].concat();
        assert!(!verdict(whole(), &twice));
        let unseen = [&good[..], &[line("begun", 2, true)]].concat();
        assert!(verdict(whole(), &unseen));
        let mut late = [&good[..], &[line("begun", 2, true)]].concat();
        late[3].head_first = false;
        assert!(!verdict(whole(), &late), "its prompt may have been computed");
        let not_streamed = [&good[..], &[line("begun", 2, false)]].concat();
        assert!(!verdict(whole(), &not_streamed));
    }

    #[test]
    fn where_it_goes_on_one_execution_may_have_died_before_the_one_that_answered() {
        let first = [line("begun", 1, true), line("head", 1, true)];
        let second = [line("begun", 2, true), line("head", 2, true), line("finished", 2, true)];
        let both = [&first[..], &second[..]].concat();
        assert!(judged(whole(), &both, true) && !judged(whole(), &both, false));
        assert!(!judged(whole(), &first, true), "nobody finished it");
        // The process finished and died before its answer was sent, or it lives and the request should not be
        // sent twice.
        let done = [line("begun", 1, true), line("head", 1, true), line("finished", 1, true)];
        let after = [&done[..], &second[..]].concat();
        assert!(judged(whole(), &after, true) && !judged(whole(), &after, false));
        let alive = [&after[..], &[line("head", 1, true)]].concat();
        assert!(!judged(whole(), &alive, true));
        let thrice = [&first[..], &[line("begun", 3, true), line("head", 3, true)], &second[..]].concat();
        assert!(!judged(whole(), &thrice, true));
        let twice =
            [&second[..], &[line("begun", 3, true), line("finished", 3, true), line("head", 2, true)]]
                .concat();
        assert!(!judged(whole(), &twice, true), "the first one had finished, and lives");
        let nothing = || Told::Refused { nothing_ran: true, words: String::new() };
        assert!(!judged(nothing(), &first, true) && judged(nothing(), &[], true));
    }

    #[test]
    fn no_means_none_and_maybe_means_at_most_one() {
        let refused = |nothing_ran| Told::Refused { nothing_ran, words: String::new() };
        let one = [line("begun", 1, true), line("head", 1, true)];
        let two = [&one[..], &[line("begun", 2, true), line("cancelled", 2, true)]].concat();
        assert!(verdict(refused(true), &[]));
        assert!(!verdict(refused(true), &one));
        assert!(verdict(refused(false), &one));
        assert!(!verdict(refused(false), &two));
        assert!(!verdict(Told::Cut, &two));
        assert!(!verdict(Told::Left, &two));
    }

    #[test]
    fn another_text_or_another_request_is_a_contradiction() {
        let good = [line("begun", 1, true), line("finished", 1, true)];
        let other =
            Told::Whole(Box::new(Answer { text: "other".to_owned(), done: true, ..Answer::default() }));
        assert!(!verdict(other, &good));
        let mut lines = good.to_vec();
        lines[0].meaning = "another".to_owned();
        assert!(!verdict(whole(), &lines));
    }
}
