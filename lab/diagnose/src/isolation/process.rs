//! A process of an isolation experiment: sends several prompts at a time and waits for all answers.

use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use warden_experiment::isolation::PromptPlace;
use warden_experiment::proof::BuildReply;
use warden_supervisor::{ServerProps, SoloProcess, SoloSpec};

use super::texts::{self, ConversationTexts};
use crate::client::{LabClient, LabRequestError};
use crate::error::DiagnoseError;
use crate::lab::Lab;
use crate::leg::{failure_text, server_facts, stuck_crash_text};
use crate::proof::questions::parse_native;
use crate::workload::ServerLimits;

/// Reason why a process gives no further answers.
#[derive(Debug)]
pub(super) enum RunStop {
    Interrupted,
    Failed(String),
}

/// Answer with the number of prompt tokens that the server reports as cached.
pub(super) type CountedReply = (BuildReply, Option<u64>);

pub(super) struct IsolationProcess<'a> {
    lab: &'a Lab,
    solo: SoloProcess,
    client: LabClient,
    stop: &'a CancellationToken,
}

impl<'a> IsolationProcess<'a> {
    pub(super) async fn start(
        lab: &'a Lab,
        spec: &SoloSpec,
        stop: &'a CancellationToken,
    ) -> Result<Self, DiagnoseError> {
        let started = stop.run_until_cancelled(lab.starter.start(spec)).await;
        let solo = started.ok_or(DiagnoseError::Interrupted)?.map_err(DiagnoseError::Start)?;
        let client = LabClient::new(&solo)?;
        Ok(Self { lab, solo, client, stop })
    }

    pub(super) async fn facts(&self) -> Result<ServerLimits, RunStop> {
        let facts = server_facts(&self.solo, &self.client, self.lab.numbers.question_limit);
        self.stop.run_until_cancelled(facts).await.ok_or(RunStop::Interrupted)
    }

    pub(super) fn props(&self) -> ServerProps {
        self.solo.props()
    }

    /// Sends the prompts at the same time.
    pub(super) async fn ask(&self, prompts: &[String], reuses: bool) -> Result<Vec<CountedReply>, RunStop> {
        let top = self.lab.proof.top;
        let asks: Vec<_> = prompts.iter().map(|prompt| texts::request(prompt, top, reuses)).collect();
        let limit = self.lab.numbers.request_limit;
        let sent = join_all(asks.iter().map(|ask| self.client.send_json(ask, limit)));
        let answers = tokio::select! {
            biased;
            () = self.stop.cancelled() => return Err(RunStop::Interrupted),
            failure = self.solo.until_end() => {
                return Err(RunStop::Failed(format!("the server ended: {}", failure_text(&failure))));
            }
            line = self.solo.until_crash_hang() => return Err(RunStop::Failed(stuck_crash_text(&line))),
            answers = sent => answers,
        };
        let mut replies = Vec::new();
        for answer in answers {
            match answer {
                Ok(json) => {
                    replies.push((parse_native(String::new(), &json), json["timings"]["cache_n"].as_u64()));
                }
                Err(error) => return Err(self.failure(&error).await),
            }
        }
        Ok(replies)
    }

    /// Sends a prompt without reuse of cached prompts.
    pub(super) async fn ask_one(
        &self,
        texts: &ConversationTexts,
        place: PromptPlace,
    ) -> Result<CountedReply, RunStop> {
        let mut replies = self.ask(&[texts.prompt(place)], false).await?;
        replies.pop().ok_or_else(|| RunStop::Failed("a request got no answer".to_owned()))
    }

    pub(super) async fn pause(&self, length: Duration) -> Result<(), RunStop> {
        self.stop.run_until_cancelled(tokio::time::sleep(length)).await.ok_or(RunStop::Interrupted)
    }

    /// Mostly the server has ended, which the supervisor notices a moment after the broken connection.
    async fn failure(&self, error: &LabRequestError) -> RunStop {
        let ended = tokio::time::timeout(self.lab.numbers.noticed, self.solo.until_end());
        RunStop::Failed(match error {
            LabRequestError::Broken(_) => match ended.await {
                Ok(failure) => format!("the server ended: {}", failure_text(&failure)),
                Err(_) => format!("a request failed: {error}"),
            },
            _ => format!("a request failed: {error}"),
        })
    }

    pub(super) async fn stop(self) {
        drop(self.client);
        self.solo.stop().await;
    }
}
