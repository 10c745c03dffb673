//! Questions by which the next server shows that it continues after the client's text, as the beginning of a
//! message.

use warden_supervisor::AnswerIdentity;

use super::ContinuationStop;
use super::asking::ContinuationClient;
use super::prefill::{PrefillContinuation, not_repeated_reason};
use super::repeat::PromptShift;
use super::{request, short_chat, spelling, tool_call};

const CHAT_PATH: Option<&str> = Some("/v1/chat/completions");

/// Builds the request for the rest, if the next server shows that it continues after the text. `settings` are
/// the server's settings, if known. Unknown settings are requested before the prompt is sent: that question
/// would overwrite the prompt's slot.
pub(super) async fn prefill_request(
    asking: &mut ContinuationClient<'_>,
    prefill: &mut PrefillContinuation,
    settings: Option<Vec<u8>>,
    kin: Option<AnswerIdentity>,
) -> Result<(Vec<u8>, PromptShift), ContinuationStop> {
    let settings = match settings {
        Some(settings) => settings,
        None => asking.ask(Some("/completion"), PrefillContinuation::settings_request()).await?,
    };
    PrefillContinuation::is_greedy(&settings)?;
    if let Some(question) = prefill.trigger_request() {
        let trigger = tool_call::read_trigger(&asking.ask(CHAT_PATH, question?).await?);
        let answer = asking.ask(CHAT_PATH, prefill.short_call_request(&trigger)?).await?;
        prefill.set_call_text(&trigger, &answer)?;
    }
    if let Some(question) = prefill.grammar_request() {
        check_grammar(asking, question, prefill.last_text()).await?;
    }
    check_special_tokens(asking, &prefill.all).await?;
    let limit = kin.and_then(|kin| kin.answer_tokens);
    if let Some(tokens) = count_appended(asking, prefill).await? {
        let rest = prefill.rest_request(tokens, limit)?;
        if let Some(question) = PrefillContinuation::echo_request(tokens)
            && !short_chat::is_echoed(&asking.ask(CHAT_PATH, question).await?)
        {
            return Err(not_repeated_reason().into());
        }
        let first = prefill.read_counts(&asking.ask(None, prefill.first_request()).await?)?;
        let now = prefill.read_counts(&asking.ask(None, prefill.second_request(&prefill.text)).await?)?;
        prefill.check_appended(&first, &now, (&prefill.text, tokens))?;
        return Ok((rest, PrefillContinuation::prompt_shift(&first, tokens)));
    }
    if !prefill.is_plain_text() {
        return Err("its template does not append the beginning of an answer to a prompt".to_owned().into());
    }
    let tokens = count_tokens(asking, spelling::count_request(&prefill.text)).await?;
    let rest = prefill.rest_request(tokens, limit)?;
    let first = prefill.read_counts(&asking.ask(None, prefill.first_request()).await?)?;
    let mut before = None;
    for text in prefill.text_steps(first.prompt, tokens) {
        let spelled = if text == prefill.text {
            tokens
        } else {
            count_tokens(asking, spelling::count_request(text)).await?
        };
        let now = prefill.read_counts(&asking.ask(None, prefill.second_request(text)).await?)?;
        prefill.check_continues(&first, before.as_ref(), &now, (text, spelled))?;
        before = Some(now);
    }
    Ok((rest, PrefillContinuation::prompt_shift(&first, tokens)))
}

async fn count_tokens(
    asking: &mut ContinuationClient<'_>,
    question: Vec<u8>,
) -> Result<u64, ContinuationStop> {
    Ok(spelling::read_count(&asking.ask(Some("/tokenize"), question).await?)?)
}

/// Checks that no part of the client's text is a special token of the model, such as the end of a turn: in a
/// rendered prompt it would become that token.
async fn check_special_tokens(
    asking: &mut ContinuationClient<'_>,
    all: &str,
) -> Result<(), ContinuationStop> {
    if all.is_empty() {
        return Ok(());
    }
    let plain = count_tokens(asking, spelling::count_request(all)).await?;
    let special = count_tokens(asking, spelling::special_count_request(all)).await?;
    if plain == special { Ok(()) } else { Err("its text has special tokens of a template".to_owned().into()) }
}

/// Checks that the server starts the grammar of tools after the text. Without that check, a second call could
/// begin within the arguments of the first.
async fn check_grammar(
    asking: &mut ContinuationClient<'_>,
    question: Vec<u8>,
    text: &str,
) -> Result<(), ContinuationStop> {
    let answer = asking.ask(CHAT_PATH, question).await?;
    let Some(start) = short_chat::grammar_start(&answer, text)? else { return Ok(()) };
    let answer = asking.ask(Some("/completion"), request::grammar_start_test(&start)).await?;
    if request::is_grammar_in_place(&answer) {
        return Ok(());
    }
    Err("its build does not apply a grammar from that text on".to_owned().into())
}

/// Returns by how many tokens the beginning of the answer makes a prompt longer, if the next server's template
/// appends it, byte by byte. Then the counts of prompt tokens suffice, and the prompt need not be cached: with
/// several slots, another request may take its slot at any time.
async fn count_appended(
    asking: &mut ContinuationClient<'_>,
    prefill: &PrefillContinuation,
) -> Result<Option<u64>, ContinuationStop> {
    let mut short = None;
    for pair in prefill.template_requests() {
        let mut prompts = Vec::new();
        for question in pair {
            match asking.ask(Some("/apply-template"), question).await {
                Ok(answer) => prompts.extend(spelling::read_rendered(&answer).ok()),
                Err(ContinuationStop::NotThisWay(_)) => return Ok(None),
                Err(stop) => return Err(stop),
            }
        }
        let [prompt, continued] = &mut prompts[..] else { return Ok(None) };
        if !prefill.is_appended(prompt, continued) {
            return Ok(None);
        }
        short.get_or_insert((std::mem::take(prompt), std::mem::take(continued)));
    }
    let Some((prompt, continued)) = short else { return Ok(None) };
    let before = count_tokens(asking, spelling::prompt_count_request(&prompt)).await?;
    let with_text = count_tokens(asking, spelling::prompt_count_request(&continued)).await?;
    Ok(with_text.checked_sub(before).filter(|tokens| *tokens > 0))
}
