package mlxstream

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Kind sorts errors by what a caller would do about them. It is an error itself, to compare with:
// errors.Is(err, mlxstream.Overloaded).
type Kind string

func (k Kind) Error() string { return "mlxstream: " + string(k) }

// The kinds of errors.
const (
	InvalidRequest     Kind = "invalid_request"     // a field is wrong; Violations names each
	PromptTooLong      Kind = "prompt_too_long"     // the prompt leaves no room in the context
	OutOfRange         Kind = "out_of_range"        // the point to resume from is no longer held
	NotFound           Kind = "not_found"           // no model, adapter or generation of this name
	AlreadyExists      Kind = "already_exists"      // the request id is in use by a live generation
	FailedPrecondition Kind = "failed_precondition" // an adapter, a checkpoint or a model file does not fit
	Overloaded         Kind = "overloaded"          // a bounded resource is full; see RetryAfter
	Unavailable        Kind = "unavailable"         // not reachable, loading, draining: try again later
	Unsupported        Kind = "unsupported"         // a known option or call that this server or model cannot honour
	Authentication     Kind = "authentication"      // no credentials, wrong ones, or not enough rights
	DeadlineExceeded   Kind = "deadline_exceeded"   // the call's deadline passed; what had arrived stays in the stream
	Cancelled          Kind = "cancelled"           // the generation was ended, here or by somebody else
	DataLoss           Kind = "data_loss"           // stored data is damaged
	StreamCut          Kind = "stream_cut"          // the stream ended without its last event
	Server             Kind = "server"              // the server's fault; Metadata holds a correlation id
)

var kindByCode = map[codes.Code]Kind{
	codes.InvalidArgument:    InvalidRequest,
	codes.OutOfRange:         OutOfRange,
	codes.NotFound:           NotFound,
	codes.AlreadyExists:      AlreadyExists,
	codes.FailedPrecondition: FailedPrecondition,
	codes.ResourceExhausted:  Overloaded,
	codes.Unavailable:        Unavailable,
	codes.Unimplemented:      Unsupported,
	codes.Unauthenticated:    Authentication,
	codes.PermissionDenied:   Authentication,
	codes.DeadlineExceeded:   DeadlineExceeded,
	codes.Canceled:           Cancelled,
	codes.DataLoss:           DataLoss,
}

// Error is what every call of this package fails with.
type Error struct {
	// Kind says what a caller would do about it.
	Kind Kind
	// Code is the status code of the call.
	Code codes.Code
	// Reason is the name of the schema's ErrorReason; where no server of ours has spoken it is STREAM_CUT, CLIENT_CLOSED or "".
	Reason string
	// Message says what happened, for people.
	Message string
	// Metadata holds the values that the message speaks of, by name.
	Metadata map[string]string
	// Violations are the bad fields of the request.
	Violations []*errdetails.BadRequest_FieldViolation
	// RetryAfter is how long the server asks to wait before another try; 0 when it does not say.
	RetryAfter time.Duration

	cause error
}

func (e *Error) Error() string { return "mlxstream: " + e.Message }

// Unwrap gives what gRPC has said.
func (e *Error) Unwrap() error { return e.cause }

// Is compares with kinds, and takes the errors of contexts for what they are.
func (e *Error) Is(target error) bool {
	switch target {
	case context.DeadlineExceeded:
		return e.Kind == DeadlineExceeded
	case context.Canceled:
		return e.Kind == Cancelled
	}
	return target == e.Kind
}

// errorOf gives the typed error of a failed call; nil for none.
func errorOf(err error) *Error {
	var known *Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return known
	case errors.Is(err, io.EOF):
		return &Error{Kind: StreamCut, Code: codes.DataLoss, Reason: "STREAM_CUT",
			Message: "the stream ended without its last event", cause: err}
	}
	told, isOfCall := status.FromError(err)
	if !isOfCall {
		told = status.FromContextError(err)
	}
	failure := &Error{Kind: Server, Code: told.Code(), Message: told.Message(), cause: err}
	if kind, known := kindByCode[told.Code()]; known {
		failure.Kind = kind
	}
	for _, detail := range told.Details() {
		switch found := detail.(type) {
		case *errdetails.ErrorInfo:
			failure.Reason, failure.Metadata = found.GetReason(), found.GetMetadata()
		case *errdetails.BadRequest:
			failure.Violations = append(failure.Violations, found.GetFieldViolations()...)
		case *errdetails.RetryInfo:
			failure.RetryAfter = found.GetRetryDelay().AsDuration()
		}
	}
	if failure.Reason == "PROMPT_TOO_LONG" {
		failure.Kind = PromptTooLong
	}
	return failure
}

// failure gives the error of a failed call of this client, which ends with the client if nothing else has ended it.
func (c *Client) failure(err error) error {
	failure := errorOf(err)
	switch {
	case failure == nil:
		return nil
	case failure.Kind == Cancelled && c.closed.Load():
		return &Error{Kind: Cancelled, Code: codes.Canceled, Reason: "CLIENT_CLOSED", Message: "the client was closed", cause: err}
	}
	return failure
}
