//! Keys without a connection: lookup, counters, and usage kept by a reload.

use std::time::Duration;

use http::header::{AUTHORIZATION, HeaderValue};
use warden_policies::WorkDone;

use super::*;

fn spec(name: &str, key: &str) -> KeySpec {
    KeySpec::unlimited(name, key)
}

fn bearer(key: &str) -> HeaderMap {
    [(AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {key}")).unwrap())].into_iter().collect()
}

fn only(spec: KeySpec) -> (ApiKeys, Arc<ApiKey>) {
    let keys = ApiKeys::new(vec![spec]);
    let key = keys.0.all[0].clone();
    (keys, key)
}

#[test]
fn each_key_is_found_and_nothing_else() {
    let keys = ApiKeys::new((0..20).map(|n| spec(&format!("n{n}"), &format!("key-{n}"))).collect());
    for n in 0..20 {
        assert_eq!(*keys.find(&bearer(&format!("key-{n}"))).unwrap().spec.name, format!("n{n}"));
    }
    assert!(matches!(keys.find(&bearer("key-20")), Err(RequestRefusal::WrongKey)));
    assert!(matches!(keys.find(&HeaderMap::new()), Err(RequestRefusal::NoKey)));
    assert!(matches!(ApiKeys::default().find(&bearer("key-1")), Err(RequestRefusal::WrongKey)));
}

#[tokio::test(start_paused = true)]
async fn a_rate_is_kept_and_the_wait_is_exact() {
    let (keys, key) = only(KeySpec { rate: Some("2/10s".parse().unwrap()), ..spec("a", "k") });
    let take = || key.admit().map(drop);
    assert!(take().is_ok() && take().is_ok());
    let Err(RequestRefusal::KeySpent { wait, what: "requests", .. }) = take() else { panic!("a third one") };
    assert_eq!(wait, Duration::from_secs(5));
    tokio::time::advance(Duration::from_millis(4999)).await;
    assert!(take().is_err());
    tokio::time::advance(Duration::from_millis(2)).await;
    assert!(take().is_ok());
    assert_eq!(keys.counts()[0].rejected, [("rate", 2), ("tokens", 0), ("concurrency", 0), ("model", 0)]);
}

#[tokio::test(start_paused = true)]
async fn tokens_are_paid_for_afterwards() {
    let (keys, key) = only(KeySpec { tokens: Some("100/10s".parse().unwrap()), ..spec("a", "k") });
    let pass = key.admit().unwrap();
    pass.charge_request(WorkDone { prompt_tokens: 120, output_tokens: 30, ..WorkDone::default() }, 0);
    let Err(RequestRefusal::KeySpent { wait, what: "tokens", .. }) = key.admit().map(drop) else {
        panic!("spent")
    };
    assert_eq!(wait, Duration::from_millis(5100), "50 are owed and one more is needed");
    tokio::time::advance(wait + Duration::from_millis(1)).await;
    assert!(key.admit().is_ok());
    let counts = &keys.counts()[0];
    assert_eq!((counts.requests, counts.prompt_tokens, counts.output_tokens), (1, 120, 30));
}

#[tokio::test]
async fn a_place_is_given_back_however_the_request_ends() {
    let (keys, key) = only(KeySpec { concurrency: Some(2), ..spec("a", "k") });
    let (first, second) = (key.admit().unwrap(), key.admit().unwrap());
    assert!(matches!(key.admit(), Err(RequestRefusal::KeyBusy { most: 2, .. })));
    assert_eq!(keys.counts()[0].running, 2);
    first.charge_request(WorkDone::default(), 0);
    let third = key.admit().unwrap();
    drop((second, third));
    assert_eq!(keys.counts()[0].running, 0);
}

#[tokio::test(start_paused = true)]
async fn what_was_refused_for_one_limit_is_not_charged_to_another() {
    let rate = Some("2/10s".parse().unwrap());
    let (_, key) = only(KeySpec { rate, concurrency: Some(1), ..spec("a", "k") });
    let pass = key.admit().unwrap();
    assert!(key.admit().is_err() && key.admit().is_err());
    drop(pass);
    assert!(key.admit().is_ok(), "the second of the rate is still there");
}

#[tokio::test(start_paused = true)]
async fn a_reload_keeps_what_was_used_and_takes_over_what_is_new() {
    let rate = Some("1/h".parse().unwrap());
    let old = ApiKeys::new(vec![KeySpec { rate, ..spec("a", "old") }, spec("gone", "x")]);
    let pass = old.0.all[0].admit().unwrap();
    let new = ApiKeys::new(vec![KeySpec { rate, concurrency: Some(1), ..spec("a", "new") }, spec("b", "y")]);
    let new = new.with_usage_of(&old);
    assert!(new.find(&bearer("old")).is_err() && new.find(&bearer("x")).is_err());
    let key = new.find(&bearer("new")).unwrap();
    assert!(matches!(key.admit(), Err(RequestRefusal::KeyBusy { .. })), "the old request is under way");
    drop(pass);
    assert!(matches!(key.admit(), Err(RequestRefusal::KeySpent { .. })), "the old rate is used up");
    assert!(new.find(&bearer("y")).unwrap().admit().is_ok());
}

impl KeySpec {
    pub(crate) fn unlimited(name: &str, key: &str) -> Self {
        let hash = KeyHash::from_key(key.as_bytes());
        Self {
            name: name.into(),
            hash,
            models: None,
            rate: None,
            tokens: None,
            concurrency: None,
            operator: false,
        }
    }
}
