//! Evaluates the conditions of `#if` as far as macros are known.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MacroValue {
    Unknown,
    Undefined,
    Defined(i64),
}

/// Evaluates a condition without known macros; `None` if it depends on a macro or has unsupported syntax.
pub(super) fn evaluate(condition: &[u8]) -> Option<bool> {
    evaluate_with(condition, &|_| MacroValue::Unknown)
}

/// Evaluates a condition; `None` if it depends on an unknown macro or has unsupported syntax.
pub(super) fn evaluate_with(condition: &[u8], known: &dyn Fn(&str) -> MacroValue) -> Option<bool> {
    let mut parser = ConditionParser { rest: condition.trim_ascii(), depth: 0, known };
    let value = parser.binary(0)?;
    // A remainder has unsupported syntax.
    if parser.rest.trim_ascii().is_empty() { value.known().map(|number| number != 0) } else { None }
}

/// Maximum nesting of parentheses; no real condition has more.
const MAX_PARENTHESES: usize = 100;

#[derive(Clone, Copy)]
enum ConditionValue {
    Known(i64),
    Unknown,
}

impl ConditionValue {
    fn known(self) -> Option<i64> {
        match self {
            Self::Known(number) => Some(number),
            Self::Unknown => None,
        }
    }

    fn from_bool(truth: bool) -> Self {
        Self::Known(i64::from(truth))
    }
}

/// Operators by increasing precedence. Within a level, an operator precedes its prefixes (`<=` before `<`).
const OPERATOR_LEVELS: [&[&[u8]]; 6] =
    [&[b"||"], &[b"&&"], &[b"==", b"!="], &[b"<=", b">=", b"<", b">"], &[b"+", b"-"], &[b"*", b"/", b"%"]];

struct ConditionParser<'a> {
    rest: &'a [u8],
    depth: usize,
    known: &'a dyn Fn(&str) -> MacroValue,
}

impl<'a> ConditionParser<'a> {
    /// Parses binary operators; `None` for unsupported syntax.
    fn binary(&mut self, level: usize) -> Option<ConditionValue> {
        let Some(operators) = OPERATOR_LEVELS.get(level) else { return self.unary() };
        let mut left = self.binary(level + 1)?;
        loop {
            self.rest = self.rest.trim_ascii_start();
            let Some(operator) = operators.iter().find(|operator| self.rest.starts_with(operator)) else {
                return Some(left);
            };
            self.rest = self.rest.get(operator.len()..).unwrap_or_default();
            let right = self.binary(level + 1)?;
            left = apply_operator(operator, left, right);
        }
    }

    fn unary(&mut self) -> Option<ConditionValue> {
        self.depth += 1;
        if self.depth > MAX_PARENTHESES {
            return None;
        }
        self.rest = self.rest.trim_ascii_start();
        let (first, rest) = self.rest.split_first()?;
        let value = match first {
            b'!' => {
                self.rest = rest;
                self.unary()?
                    .known()
                    .map_or(ConditionValue::Unknown, |number| ConditionValue::from_bool(number == 0))
            }
            b'-' | b'+' => {
                self.rest = rest;
                let value = self.unary()?;
                let negative =
                    |number: i64| number.checked_neg().map_or(ConditionValue::Unknown, ConditionValue::Known);
                if *first == b'-' { value.known().map_or(ConditionValue::Unknown, negative) } else { value }
            }
            b'(' => {
                self.rest = rest;
                let value = self.binary(0)?;
                self.rest = self.rest.trim_ascii_start().strip_prefix(b")")?;
                value
            }
            b'0'..=b'9' => parse_number(self.word()),
            _ => match self.word() {
                [] => return None,
                b"true" => ConditionValue::Known(1),
                b"false" => ConditionValue::Known(0),
                b"defined" => self.defined()?,
                name => {
                    let known = self.look_up(name);
                    // The result of a function-like macro is unknown.
                    let called = self.rest.trim_ascii_start().starts_with(b"(");
                    match known {
                        MacroValue::Undefined if !called => ConditionValue::Known(0),
                        MacroValue::Defined(number) if !called => ConditionValue::Known(number),
                        _ => self.arguments()?,
                    }
                }
            },
        };
        self.depth -= 1;
        Some(value)
    }

    fn look_up(&self, name: &[u8]) -> MacroValue {
        std::str::from_utf8(name).map_or(MacroValue::Unknown, |name| (self.known)(name))
    }

    fn defined(&mut self) -> Option<ConditionValue> {
        self.rest = self.rest.trim_ascii_start();
        let inside = self.rest.strip_prefix(b"(");
        self.rest = inside.unwrap_or(self.rest).trim_ascii_start();
        let name = self.word();
        if name.is_empty() {
            return None;
        }
        if inside.is_some() {
            self.rest = self.rest.trim_ascii_start().strip_prefix(b")")?;
        }
        Some(match self.look_up(name) {
            MacroValue::Unknown => ConditionValue::Unknown,
            MacroValue::Undefined => ConditionValue::from_bool(false),
            MacroValue::Defined(_) => ConditionValue::from_bool(true),
        })
    }

    fn arguments(&mut self) -> Option<ConditionValue> {
        let rest = self.rest.trim_ascii_start();
        if rest.starts_with(b"(") {
            let mut depth = 0usize;
            let end = rest.iter().position(|byte| {
                match byte {
                    b'(' => depth += 1,
                    b')' => depth -= 1,
                    _ => {}
                }
                depth == 0
            })?;
            self.rest = rest.get(end + 1..).unwrap_or_default();
        }
        Some(ConditionValue::Unknown)
    }

    fn word(&mut self) -> &'a [u8] {
        let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'\'');
        let length = self.rest.iter().position(|byte| !is_word(byte)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(length);
        self.rest = rest;
        word
    }
}

fn parse_number(word: &[u8]) -> ConditionValue {
    let text: String = String::from_utf8_lossy(word).chars().filter(|sign| *sign != '\'').collect();
    let text = text.trim_end_matches(['u', 'U', 'l', 'L']);
    let parsed = if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        i64::from_str_radix(digits, 16)
    } else if let Some(digits) = text.strip_prefix("0b").or_else(|| text.strip_prefix("0B")) {
        i64::from_str_radix(digits, 2)
    } else if text.len() > 1 && text.starts_with('0') {
        i64::from_str_radix(text, 8)
    } else {
        text.parse()
    };
    parsed.map_or(ConditionValue::Unknown, ConditionValue::Known)
}

fn apply_operator(operator: &[u8], left: ConditionValue, right: ConditionValue) -> ConditionValue {
    let (a, b) = (left.known(), right.known());
    match operator {
        b"&&" if a == Some(0) || b == Some(0) => ConditionValue::Known(0),
        b"||" if a.is_some_and(|a| a != 0) || b.is_some_and(|b| b != 0) => ConditionValue::Known(1),
        _ => {
            let (Some(a), Some(b)) = (a, b) else { return ConditionValue::Unknown };
            let number = |number: Option<i64>| number.map_or(ConditionValue::Unknown, ConditionValue::Known);
            match operator {
                b"&&" => ConditionValue::from_bool(a != 0 && b != 0),
                b"||" => ConditionValue::from_bool(a != 0 || b != 0),
                b"==" => ConditionValue::from_bool(a == b),
                b"!=" => ConditionValue::from_bool(a != b),
                b"<=" => ConditionValue::from_bool(a <= b),
                b">=" => ConditionValue::from_bool(a >= b),
                b"<" => ConditionValue::from_bool(a < b),
                b">" => ConditionValue::from_bool(a > b),
                b"+" => number(a.checked_add(b)),
                b"-" => number(a.checked_sub(b)),
                b"*" => number(a.checked_mul(b)),
                b"/" => number(a.checked_div(b)),
                b"%" => number(a.checked_rem(b)),
                _ => ConditionValue::Unknown,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_is_known_as_far_as_no_macro_decides_it() {
        for never in [
            "0",
            "(0)",
            "0 && 1",
            "1 && 0",
            "0 && FOO",
            "FOO && 0",
            "!1",
            "false",
            "!defined(X) && 0",
            "1 == 2",
            "0x0",
            "1 - 1",
            "(FOO(a, (b)) || 1) && 00",
            "2 < 1",
            "0u",
        ] {
            assert_eq!(evaluate(never.as_bytes()), Some(false), "{never}");
        }
        for always in [
            "1",
            "1 || FOO",
            "FOO || 1",
            "!0",
            "true",
            "2 > 1 && 1",
            "defined X || 3",
            "0 || 1",
            "1'000 == 1000",
        ] {
            assert_eq!(evaluate(always.as_bytes()), Some(true), "{always}");
        }
        for unknown in [
            "FOO",
            "defined(X)",
            "defined X",
            "!FOO",
            "FOO && 1",
            "__has_include(<a.h>)",
            "1 ? 0 : 1",
            "",
            "(0",
            "1 1",
            "FOO == 1",
            "1 / 0",
            "& 1",
        ] {
            assert_eq!(evaluate(unknown.as_bytes()), None, "{unknown}");
        }
        assert_eq!(evaluate("(".repeat(10_000).as_bytes()), None);
    }

    #[test]
    fn a_condition_is_decided_by_the_macros_that_are_known() {
        let known = |name: &str| match name {
            "ONE" => MacroValue::Defined(1),
            "TWO" => MacroValue::Defined(2),
            "NONE" => MacroValue::Undefined,
            _ => MacroValue::Unknown,
        };
        let value = |condition: &str| evaluate_with(condition.as_bytes(), &known);
        for always in [
            "defined(ONE)",
            "defined ONE",
            "defined( ONE ) && !defined(NONE)",
            "!NONE",
            "TWO > ONE",
            "defined(ONE) == defined(TWO)",
            "defined(OTHER) || defined(ONE)",
        ] {
            assert_eq!(value(always), Some(true), "{always}");
        }
        for never in ["NONE", "defined(NONE)", "defined(ONE) == defined(NONE)", "ONE - 1", "OTHER && NONE"] {
            assert_eq!(value(never), Some(false), "{never}");
        }
        for unknown in ["OTHER", "defined(OTHER)", "ONE(1)", "NONE (1)", "defined(ONE", "defined()"] {
            assert_eq!(value(unknown), None, "{unknown}");
        }
    }
}
