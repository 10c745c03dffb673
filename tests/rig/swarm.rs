//! Sends many requests by several clients at once, and compares two such runs: with an undisturbed server and
//! with a disturbed one, clients must get the same answers.

use std::collections::BTreeMap;

use futures_util::{StreamExt as _, stream};
use serde_json::Value;

use crate::warden::{CHAT, chat};
use crate::{Answer, Context as _, Http, Trouble};

/// Answer, or the reason why there is none, by the name of the request.
pub type Answers = BTreeMap<String, Result<Answer, String>>;

/// Creates chat requests named `prefix-0`, `prefix-1`, ..., every second one streamed, each with words of its
/// own.
pub fn requests(prefix: &str, model: &str, count: usize, tokens: u64) -> Vec<Value> {
    let one = |n: usize| {
        chat(&format!("{prefix}-{n}"), model, &format!("say it {n} times"), tokens, n.is_multiple_of(2))
    };
    (0..count).map(one).collect()
}

/// Names of requests.
pub fn names(requests: &[Value]) -> Vec<String> {
    requests.iter().map(|request| request["user"].as_str().unwrap_or("-").to_owned()).collect()
}

/// Sends each request once, `clients` at a time.
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

/// Sends a chat request; returns the whole answer.
///
/// # Errors
/// The status is not 2xx, or the answer is incomplete.
pub async fn answer(http: &Http, request: &Value) -> Result<Answer, Trouble> {
    let whole = http.post(CHAT, request).await?;
    if !whole.status.is_success() {
        return Err(Trouble::new(format!("{}: {}", whole.status, whole.text())));
    }
    let answer = whole.answer()?;
    if answer.is_whole() { Ok(answer) } else { Err(Trouble::new(format!("not whole: {answer:?}"))) }
}

/// Checks that every request got the same complete answer in both runs.
///
/// # Errors
/// The error names the first five requests with a difference.
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

/// Checks that every request got a complete answer.
///
/// # Errors
/// The error names the first five requests without one.
pub fn all_whole(answers: &Answers) -> Result<(), Trouble> {
    let mut wrong: Vec<String> = answers
        .iter()
        .filter_map(|(name, got)| got.as_ref().err().map(|why| format!("{name}: {why}")))
        .collect();
    let count = wrong.len();
    wrong.truncate(5);
    (count == 0).then_some(()).context(format!("{count} of {} failed: {}", answers.len(), wrong.join("; ")))
}
