//! No bytes from a client become a second request: each request of the corpus is refused and its connection
//! closed, or it arrives as written in the corpus; and no client gets another's answer. This also holds for a
//! llama-server that leaves bodies unread.

mod answers;
mod corpus;
mod rivals;
mod unread;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use warden_rig::raw::{self, Log, Talk, answers as split, arrived, echo, talk};
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden};

use self::corpus::{Case, Verdict};

/// Limit for an answer; the corpus has requests without one.
const PATIENCE: Duration = Duration::from_secs(10);
/// Limit if no answer is expected.
const SHORT: Duration = Duration::from_millis(300);

async fn started(answers: &BTreeMap<String, String>) -> Result<(Warden, Log), Trouble> {
    let (setup, log) = raw::model(Setup::new()?, answers)?;
    let warden = setup.start().await?;
    warden.until_ready(1).await?;
    Ok((warden, log))
}

/// Checks one case; the error names the violation.
async fn judge(http: &Http, log: &Log, case: &Case) -> Outcome {
    let before = log.requests()?.len();
    let patience = if case.verdict == Verdict::Never { SHORT } else { PATIENCE };
    let went = talk(http, &case.bytes, patience).await?;
    let clean = format!("/clean?{}", case.name.replace(|c: char| !c.is_ascii_alphanumeric(), "-"));
    let after = talk(http, &format!("GET {clean} HTTP/1.1\r\nHost: x\r\n\r\n"), PATIENCE).await?;
    let is_clean = after.status() == 200
        && after.answers.len() == 1
        && arrived(&echo(&after.answers[0])?)? == format!("GET {clean} HTTP/1.1\n\n");
    let got = log.requests()?.split_off(before);
    let not = |what: &str| {
        Err(Trouble::new(format!("{what}; {:?} became {went:?}, upstream got {got:?}", case.bytes)))
    };
    if !is_clean {
        return not(&format!("a clean request afterwards got {after:?}"));
    }
    if got.iter().any(|raw| raw.contains("/smuggled")) {
        return not("a smuggled request arrived");
    }
    let whole: Vec<&String> = got.iter().filter(|raw| !raw.contains("/clean?")).collect();
    let statuses: Vec<u16> = went.answers.iter().map(|answer| answer.status).collect();
    match &case.verdict {
        Verdict::Refused(wanted) => {
            let is_refusal = |status: u16| {
                if *wanted == 0 { (400..=505).contains(&status) && status != 502 } else { status == *wanted }
            };
            if !whole.is_empty() || statuses.len() != 1 || !is_refusal(statuses[0]) || !went.closed {
                return not(&format!("not refused with {wanted} and closed"));
            }
        }
        Verdict::Ours(status) => {
            if !whole.is_empty() || statuses != [*status] {
                return not("not answered by ourselves");
            }
        }
        Verdict::Passed(wanted) => {
            if whole.len() != 1 || went.status() != 200 {
                return not("not passed once");
            }
            let arrives = arrived(whole[0])?;
            if arrives != *wanted {
                return not(&format!("arrived as {arrives:?} instead of {wanted:?}"));
            }
        }
        Verdict::Closed => {
            if !whole.is_empty() || statuses.iter().any(|status| *status < 400) || !went.closed {
                return not("not closed");
            }
        }
        Verdict::Never => {
            if !whole.is_empty() || statuses.contains(&200) {
                return not("it became complete");
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn every_request_of_the_corpus_is_refused_or_arrives_exactly_as_written_down() -> Outcome {
    let (warden, log) = started(&BTreeMap::new()).await?;
    let cases = corpus::all();
    let names: BTreeSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
    assert_eq!(names.len(), cases.len(), "names are unique");
    let mut wrong = Vec::new();
    for case in &cases {
        if let Err(trouble) = judge(&warden.http, &log, case).await {
            let told: String = format!("{}: {trouble}", case.name).chars().take(700).collect();
            wrong.push(told);
        }
    }
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    Ok(())
}

#[tokio::test]
async fn requests_behind_each_other_on_one_connection_are_answered_in_order() -> Outcome {
    let (warden, log) = started(&BTreeMap::new()).await?;
    let three = "POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nGET /POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n\
                 5\r\nhello\r\n0\r\n\r\nGET /c HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let mut raw = warden.http.raw().await?;
    raw.write(three.as_bytes()).await?;
    let all = split(&raw.to_end(SOON).await?, false);
    let bodies: Vec<String> =
        all.iter().map(|answer| arrived(&echo(answer)?)).collect::<Result<_, Trouble>>()?;
    assert_eq!(
        bodies,
        ["POST /a HTTP/1.1\n\nGET /", "POST /b HTTP/1.1\n\nhello", "GET /c HTTP/1.1\n\n"],
        "each body is its own"
    );
    assert_eq!(log.requests()?.len(), 3);
    Ok(())
}

#[tokio::test]
async fn a_bad_request_behind_a_good_one_is_refused_and_the_good_one_served() -> Outcome {
    let (warden, log) = started(&BTreeMap::new()).await?;
    let good =
        "POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;x\r\nhello\r\n0\r\nA: b\r\n\r\n";
    let bad =
        "POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    let mut raw = warden.http.raw().await?;
    raw.write(format!("{good}{bad}{}", corpus::SMUGGLED).as_bytes()).await?;
    let all = split(&raw.to_end(SOON).await?, false);
    let statuses: Vec<u16> = all.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [200, 400]);
    assert_eq!(log.requests()?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_request_that_was_here_before_is_refused_and_another_wardens_is_not() -> Outcome {
    let (one, log) = started(&BTreeMap::new()).await?;
    let (two, _) = started(&BTreeMap::new()).await?;
    let via = |raw: &str| -> Result<String, Trouble> {
        let line = raw.lines().find(|line| line.starts_with("via: ")).context(raw)?;
        Ok(line.trim_start_matches("via: ").to_owned())
    };
    let first = talk(&one.http, "GET /e HTTP/1.0\r\n\r\n", PATIENCE).await?;
    let ours = via(&echo(&first.answers[0])?)?;
    assert!(ours.starts_with("1.0 llama-warden-"), "{ours}");
    assert!(first.answers[0].head.contains("\r\nvia: 1.1 llama-warden-"), "{first:?}");
    let again = format!("GET /e HTTP/1.1\r\nHost: x\r\nVia: 1.1 a, {ours}\r\n\r\n");
    let before = log.requests()?.len();
    let refused = talk(&one.http, &again, PATIENCE).await?;
    assert_eq!((refused.status(), refused.closed), (508, true), "{refused:?}");
    assert_eq!(log.requests()?.len(), before);
    let other = talk(&two.http, &again, PATIENCE).await?;
    assert_eq!(other.status(), 200, "another instance has another name: {other:?}");
    Ok(())
}

#[tokio::test]
async fn an_old_client_gets_no_chunks_and_its_connection_ends() -> Outcome {
    let warden = Setup::new()?.fake("m", &serde_json::json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let body = warden_rig::warden::chat("old", "m", "hi", 5, true).to_string();
    let head = format!("POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let went: Talk = talk(&warden.http, &head, PATIENCE).await?;
    let answer = went.answers.first().context("no answer")?;
    let head = answer.head.to_ascii_lowercase();
    assert!(
        went.closed && !head.contains("transfer-encoding") && head.contains("text/event-stream"),
        "{answer:?}"
    );
    assert!(answer.body.starts_with("data: ") && answer.body.ends_with("data: [DONE]\n\n"), "{answer:?}");
    Ok(())
}
