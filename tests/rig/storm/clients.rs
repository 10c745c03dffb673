//! Clients of a storm, and the results that they get.

use std::time::Duration;

use serde_json::Value;
use tokio::time::timeout;

use super::{MODELS, PATIENCE, Storm, Weather, faults};
use crate::dice::Dice;
use crate::warden::{CHAT, chat};
use crate::{Answer, Context as _, Http, Trouble};

/// Result of a request for its client.
#[derive(Debug)]
pub enum Told {
    /// A complete answer.
    Whole(Box<Answer>),
    /// An error in place of an answer.
    Refused {
        /// True if the error says that nothing was executed.
        nothing_ran: bool,
        /// Status and body.
        words: String,
    },
    /// The answer broke off visibly.
    Cut,
    /// The client left.
    Left,
}

/// Request and its result.
#[derive(Debug)]
pub struct Sent {
    /// Name of the request in the ledger.
    pub id: String,
    /// Body of the request.
    pub request: Value,
    /// Result; an error is a broken promise.
    pub told: Result<Told, Trouble>,
}

impl Sent {
    /// Name of the result, for counts.
    pub fn label(&self) -> &'static str {
        match &self.told {
            Ok(Told::Whole(_)) => "whole",
            Ok(Told::Refused { nothing_ran: true, .. }) => "refused",
            Ok(Told::Refused { .. }) => "refused, maybe executed",
            Ok(Told::Cut) => "cut",
            Ok(Told::Left) => "left",
            Err(_) => "wrong",
        }
    }
}

/// Sends one chat request.
///
/// # Errors
/// The client got no answer in time or at all, an error without words, or half an answer that looks whole.
pub async fn one(http: &Http, request: &Value, leave_after: Option<Duration>) -> Result<Told, Trouble> {
    let whole = async {
        let flow = http.stream(CHAT, request).await.context("no answer at all")?;
        let status = flow.status();
        if !status.is_success() {
            let whole = flow.whole().await?;
            let words = format!("{status} {}", whole.text());
            whole.json()?["error"].as_object().context(format!("an error without `error`: {words}"))?;
            return Ok(Told::Refused { nothing_ran: whole.header("x-warden-executed") == "no", words });
        }
        let Ok(whole) = flow.whole().await else { return Ok(Told::Cut) };
        let answer = whole.answer()?;
        match answer.is_whole() {
            true => Ok(Told::Whole(Box::new(answer))),
            false if answer.error.is_some() => Ok(Told::Cut),
            false => Err(Trouble::new(format!("ended as if whole, and is not: {answer:?}"))),
        }
    };
    match leave_after {
        Some(after) => timeout(after, whole).await.unwrap_or(Ok(Told::Left)),
        None => timeout(PATIENCE, whole).await.context("answered in time")?,
    }
}

/// Sends all requests of one client, one after the other.
pub(super) async fn client(http: Http, number: u64, storm: Storm) -> Vec<Sent> {
    let mut dice = Dice::new(storm.seed ^ (number << 32));
    let mut all = Vec::new();
    let (of_each, one_in) = storm.faults;
    let kinds = faults().len() as u64;
    for n in 0..storm.each {
        let id = format!("c{number}-{n}");
        let model = if dice.one_in(3) { MODELS[0] } else { MODELS[1] };
        let fault = dice.one_in(one_in) && storm.weather == Weather::Foul;
        let words = if fault {
            format!("{id} fault-{}-{}.", dice.below(kinds), dice.below(of_each))
        } else {
            id.clone()
        };
        let tokens = storm.tokens.0 + dice.below(storm.tokens.1);
        let request = chat(&id, model, &words, tokens, dice.one_in(2));
        let leaves = dice.one_in(7).then(|| Duration::from_millis(dice.below(storm.leaves_within_ms)));
        let told = one(&http, &request, leaves).await;
        all.push(Sent { id, request, told });
    }
    all
}
