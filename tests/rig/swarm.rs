//! Many requests by several clients at once, and the comparison of two such runs: what one undisturbed server answers is
//! what every client must get from a disturbed one.

use std::collections::BTreeMap;

use futures_util::{StreamExt as _, stream};
use serde_json::Value;

use crate::warden::{CHAT, chat};
use crate::{Answer, Context as _, Http, Trouble};

/// Answers, or why there was none, by the requests' names.
pub type Answers = BTreeMap<String, Result<Answer, String>>;

/// `count` chat requests named `prefix-0`, `prefix-1`, ..., every second one streamed, each with words of its own.
pub fn requests(prefix: &str, model: &str, count: usize, tokens: u64) -> Vec<Value> {
    let one = |n: usize| {
        chat(&format!("{prefix}-{n}"), model, &format!("say it {n} times"), tokens, n.is_multiple_of(2))
    };
    (0..count).map(one).collect()
}

/// The names of requests.
pub fn names(requests: &[Value]) -> Vec<String> {
    requests.iter().map(|request| request["user"].as_str().unwrap_or("-").to_owned()).collect()
}

/// Sends all of `requests`, `clients` at a time, each once.
pub async fn swarm(http: &Http, requests: &[Value], clients: usize) -> Answers {
    let send = |request: &Value| {
        let request = request.clone();
        async move {
            let name = request["user"].as_str().unwrap_or("-").to_owned();
            let answer = answer(http, &request).await;
            (name, answer.map_err(|trouble| trouble.to_string()))
        }
    };
    let futures: Vec<_> = requests.iter().map(send).collect();
    stream::iter(futures).buffer_unordered(clients).collect().await
}

/// One chat request: the whole answer, or what was wrong with it.
///
/// # Errors
/// Anything but a 2xx with a complete answer.
pub async fn answer(http: &Http, request: &Value) -> Result<Answer, Trouble> {
    let whole = http.post(CHAT, request).await?;
    if !whole.status.is_success() {
        return Err(Trouble::new(format!("{}: {}", whole.status, whole.text())));
    }
    let answer = whole.answer()?;
    if answer.is_whole() { Ok(answer) } else { Err(Trouble::new(format!("not whole: {answer:?}"))) }
}

/// Checks that every request was answered in both runs, and with the same text and the same end.
///
/// # Errors
/// A sentence that names the first five that were not.
pub fn same(undisturbed: &Answers, disturbed: &Answers) -> Result<(), Trouble> {
    let mut wrong = Vec::new();
    for (name, wanted) in undisturbed {
        let wanted = wanted.as_ref().map_err(|why| Trouble::new(format!("undisturbed {name}: {why}")))?;
        match disturbed.get(name) {
            Some(Ok(got)) if (&got.text, &got.finish) == (&wanted.text, &wanted.finish) => {}
            Some(Ok(got)) => wrong.push(format!("{name}: {:?} instead of {:?}", got.text, wanted.text)),
            Some(Err(why)) => wrong.push(format!("{name}: {why}")),
            None => wrong.push(format!("{name}: never sent")),
        }
    }
    let count = wrong.len();
    wrong.truncate(5);
    (count == 0).then_some(()).context(format!(
        "{count} of {} differ: {}",
        undisturbed.len(),
        wrong.join("; ")
    ))
}

/// Checks that every request was answered whole.
///
/// # Errors
/// A sentence that names the first five that were not.
pub fn all_whole(answers: &Answers) -> Result<(), Trouble> {
    let mut wrong: Vec<String> = answers
        .iter()
        .filter_map(|(name, got)| got.as_ref().err().map(|why| format!("{name}: {why}")))
        .collect();
    let count = wrong.len();
    wrong.truncate(5);
    (count == 0).then_some(()).context(format!("{count} of {} failed: {}", answers.len(), wrong.join("; ")))
}
