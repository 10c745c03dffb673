//! Questions by which the next server shows that it continues after the client's text, as the beginning of a
//! message.

use warden_supervisor::AnswerIdentity;

use super::ContinuationStop;
use super::asking::ContinuationClient;
use super::prefill::{PrefillContinuation, not_repeated_reason};
use super::repeat::PromptShift;
use super::{request, spelling, tool_call};

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
        check_grammar(asking, question, &prefill.text).await?;
    }
    let has_marks = prefill.call.is_some();
    let count = spelling::count_request(&prefill.text, has_marks);
    let tokens = spelling::read_count(&asking.ask(Some("/tokenize"), count).await?)?;
    let rest = prefill.rest_request(tokens, kin.and_then(|kin| kin.answer_tokens))?;
    let is_appended = is_appended(asking, prefill).await?;
    if is_appended
        && let Some(question) = prefill.echo_request(tokens)
        && !tool_call::is_echoed(&asking.ask(CHAT_PATH, question).await?)
    {
        return Err(not_repeated_reason().into());
    }
    let first = prefill.read_counts(&asking.ask(None, prefill.first_request()).await?)?;
    if is_appended {
        let now = prefill.read_counts(&asking.ask(None, prefill.second_request(&prefill.text)).await?)?;
        prefill.check_appended(&first, &now, (&prefill.text, tokens))?;
        return Ok((rest, PrefillContinuation::prompt_shift(&first, tokens)));
    }
    let mut before = None;
    for text in prefill.text_steps(first.prompt, tokens) {
        let spelled = if text == prefill.text {
            tokens
        } else {
            let count = spelling::count_request(text, has_marks);
            spelling::read_count(&asking.ask(Some("/tokenize"), count).await?)?
        };
        let now = prefill.read_counts(&asking.ask(None, prefill.second_request(text)).await?)?;
        prefill.check_continues(&first, before.as_ref(), &now, (text, spelled))?;
        before = Some(now);
    }
    Ok((rest, PrefillContinuation::prompt_shift(&first, tokens)))
}

/// Checks that the server starts the grammar of tools after the text. Without that check, a second call could
/// begin within the arguments of the first.
async fn check_grammar(
    asking: &mut ContinuationClient<'_>,
    question: Vec<u8>,
    text: &str,
) -> Result<(), ContinuationStop> {
    let answer = asking.ask(CHAT_PATH, question).await?;
    let Some(start) = tool_call::grammar_start(&answer, text)? else { return Ok(()) };
    let answer = asking.ask(Some("/completion"), request::grammar_start_test(&start)).await?;
    if request::is_grammar_in_place(&answer) {
        return Ok(());
    }
    Err("its build does not apply a grammar from that text on".to_owned().into())
}

/// Returns whether the next server's template appends the text to the prompt, byte by byte. Then the counts of
/// prompt tokens suffice, and the prompt need not be cached: with several slots, another request may take
/// its slot at any time.
async fn is_appended(
    asking: &mut ContinuationClient<'_>,
    prefill: &PrefillContinuation,
) -> Result<bool, ContinuationStop> {
    let mut prompts = Vec::new();
    for question in prefill.template_requests() {
        match asking.ask(Some("/apply-template"), question).await {
            Ok(answer) => prompts.extend(spelling::read_rendered(&answer).ok()),
            Err(ContinuationStop::NotThisWay(_)) => return Ok(false),
            Err(stop) => return Err(stop),
        }
    }
    let [prompt, continued] = &prompts[..] else { return Ok(false) };
    Ok(continued.strip_prefix(&**prompt) == Some(&*prefill.text))
}
